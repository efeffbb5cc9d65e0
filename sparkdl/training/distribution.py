"""The distribution of a fit's module over the ranks: each has a replica, or a part as a Parallelism describes.

A *reader* reads rows of its own: a rank, or all ranks that work on the same rows, such as those of a tensor or context
group. :func:`sparkdl.training.trainer.distribute` chooses the distribution of a fit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparkdl.errors import ParamError
from sparkdl.model.architecture import join_module, split_module
from sparkdl.model.losses import LossTerm
from sparkdl.torch import (
    DataParallel,
    LocalUpdates,
    ReplicaCheck,
    init_process_group,
    synchronized_batch_norms,
)
from sparkdl.torch.buffers import plain_parts
from sparkdl.torch.replicas import LiveParameters
from sparkdl.training.objective import Evaluation, StepModule
from sparkdl.training.precision import use_float8
from sparkdl.training.spec import DRAWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import ExitStack

    from torch import Tensor
    from torch.optim import Optimizer

    from sparkdl.collective import Communicator
    from sparkdl.parallel import RankLayout
    from sparkdl.training.objective import Batch, Objective
    from sparkdl.training.spec import TrainingSpec


class ModelDistribution(ABC):
    """The part of a fit's module on this rank, and how the ranks compute with it.

    Attributes:
        module: module on this rank, or its part of the module.
        parts: ``module``, or with a pipeline the stages of this rank.
        called: module that a training step calls: ``module``, or its wrapper.
        evaluated: module that is called without gradients.
        rank: rank of this process.
        num_ranks: number of ranks of the fit.
        reader: number of this rank's reader, from 0; see :mod:`sparkdl.training.distribution`.
        num_readers: number of readers.
        counts_rows: whether this rank counts its rows; among ranks with the same rows one does.
        counts_outputs: whether this rank updates metrics with the module's outputs.
        num_averaged: number of ranks over which gradients are averaged: readers, and ranks that share sequences.
        generator_index: number in the seed of this rank's random numbers; ranks with different numbers draw different
            ones.
        name: name of the layout; if it is the same when a fit resumes, each rank continues with its own state.
        is_divided: whether each rank has only a part of the module, so that operations on the whole are collective.
        local: updates that each rank makes of its own weights; None if each update is made of averaged gradients.
        sharers: communicator of the ranks that have the same part of the module as this one, and their global ranks.
    """

    is_divided = False
    counts_rows = counts_outputs = True
    local: LocalUpdates | None = None
    module: nn.Module
    parts: nn.Module | list[nn.Module]
    called: nn.Module
    evaluated: nn.Module
    rank: int
    num_ranks: int
    reader: int
    num_readers: int
    num_averaged: int
    generator_index: int
    name: str
    sharers: tuple[Communicator, list[int]]

    def forward_backward(
        self,
        objective: Objective,
        batch: Batch,
        *,
        scaled: Callable[[LossTerm], Tensor],
        check: Callable[[Tensor], None] = lambda _: None,
    ) -> Evaluation:
        """Apply the module to a batch, and accumulate the gradients of its loss. Collective if the module is divided.

        Args:
            objective: objective of the fit.
            batch: prepared batch of at least one row.
            scaled: function that scales the loss for the backward pass.
            check: function that is called with the mean loss before the backward pass; with a pipeline, after it.
        """
        evaluation = objective.evaluate(self.called, batch)
        check(evaluation.term.mean)
        scaled(evaluation.term).backward()
        return evaluation

    def evaluate(self, objective: Objective, batch: Batch) -> Evaluation:
        """Apply the module to a batch without gradients. Collective if the module is divided."""
        return objective.evaluate(self.evaluated, batch)

    def end_evaluation(self) -> None:  # noqa: B027  # sharded modules alone keep something
        """Let the module have its own parameters again after :meth:`evaluate`."""

    def share_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Broadcast rank 0's values of the buffers to all ranks. Collective."""
        if self.num_ranks > 1:
            for buffer in buffers:
                for part in plain_parts(buffer):
                    torch.distributed.broadcast(part, 0)

    def take_up_changes(self) -> None:  # noqa: B027  # whole modules alone may change
        """Take up layers that were added or replaced, and parameters that were frozen or unfrozen. Collective."""

    @property
    def is_local(self) -> bool:
        """Whether the next update is made of the gradients of this rank, or of some ranks, alone."""
        return self.local is not None and self.local.is_local

    def after_update(self, *, ends_epoch: bool, is_due: bool) -> bool:
        """Synchronize the ranks after an update if it is time; return whether all have the same weights. Collective.

        Args:
            ends_epoch: whether it is the last update of an epoch, after which the ranks synchronize in any case.
            is_due: whether a checkpoint, or a border of an elastic fit, waits for a synchronization.
        """
        del ends_epoch, is_due
        return True

    def begin(self) -> None:  # noqa: B027  # local updates alone begin with weights
        """Begin with the weights that the module has now, such as those of a checkpoint."""

    def rank_state(self) -> dict[str, Any]:
        """The state of this rank's replica that other ranks do not share, for a checkpoint."""
        return {}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # replicas alone have one
        """Continue from what :meth:`rank_state` returned on this rank."""

    def replica_check(self, optimizer: Optimizer) -> ReplicaCheck | None:
        """The comparison of this rank's module with its replicas; None if there are none. Collective."""
        communicator, ranks = self.sharers
        if len(ranks) == 1:
            return None
        return ReplicaCheck(self.module, optimizer=optimizer, communicator=communicator)

    def without_rows(self) -> AbstractContextManager[Any]:
        """Context for the backward pass of a rank without rows, whose loss is multiplied by 0.

        A subclass may leave parameters that only this pass uses without gradients, as in one process, which has no such
        pass. This default does nothing: in a sharded module, all ranks must use the same parameters. FSDP2's ranks
        compare them, and raise an error if they differ.
        """
        return nullcontext()

    def clip_gradients(self, max_norm: float) -> None:
        """Scale the gradients so that their joint norm is at most ``max_norm``."""
        nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    @abstractmethod
    def without_averaging(self) -> AbstractContextManager[Any]:
        """Within this context gradients stay local, to be averaged together with later ones."""


class Replicas(ModelDistribution):
    """Data parallelism: every rank trains the whole module on its own rows; backward passes average the gradients.

    All ranks get the weights of rank 0.

    Args:
        spec: spec of the fit; its module is moved to the device, and trained.
        communicator: communicator of all ranks.
        device: device of this rank.
        resources: exit stack that closes the wrapper of the module.
    """

    def __init__(
        self, spec: TrainingSpec, communicator: Communicator, device: torch.device, resources: ExitStack
    ) -> None:
        self.module = self.parts = place(spec.model, spec, device).train()
        self._step: StepModule | None = None
        self._before: tuple[bytes, dict[str, Tensor]] | None = None
        if spec.precision == "float8":
            self._before = _take_apart(self.module)
            use_float8(self.module, device)
        self._recomputed: list[nn.Module] = []
        if spec.parallelism is not None and spec.parallelism.recompute:
            from sparkdl.parallel import blocks_of, recompute_activations

            self._recomputed = blocks_of(self.module)
            recompute_activations(self._recomputed)
        self._device = device
        self._finds_unused = spec.has_unused_parameters
        self.rank = self.reader = self.generator_index = communicator.rank
        self.num_ranks = self.num_readers = self.num_averaged = communicator.world_size
        self.name = f"{communicator.world_size} replicas"
        self.sharers = communicator, list(range(communicator.world_size))
        self._resources = resources
        self._compression = spec.compression
        if spec.synchronization is not None:
            self.local = LocalUpdates(self.module, spec.synchronization, communicator)
            resources.callback(self.local.close)
        self.called = self._wrap(spec, communicator, device)
        self.evaluated = self.module

    def _wrap(self, spec: TrainingSpec, communicator: Communicator, device: torch.device) -> nn.Module:
        module = self.module
        if spec.sync_batch_norm and communicator.world_size > 1:
            self._resources.enter_context(synchronized_batch_norms(module))
        if spec.compile:
            module.compile()
        if communicator.world_size == 1:
            return module
        # Also for modules that use torch.distributed themselves, as SyncBatchNorm does.
        init_process_group(communicator, cuda=device.type == "cuda")
        called = module
        if spec.user_step is not None:
            # Operations of NCCL are not counted: there, a step without rows is called as if it had collectives.
            count = partial(_num_operations, communicator) if device.type == "cpu" else None
            self._step = called = StepModule(module, spec.user_step, count)
        if self.is_local:
            return self._wrap_locally(called)
        return self._wrap_by_own(called, communicator) if device.type == "cpu" else self._wrap_by_ddp(called)

    def _wrap_by_own(self, whole: nn.Module, communicator: Communicator) -> DataParallel:
        wrapped = DataParallel(whole, communicator, compression=self._compression)
        self._resources.callback(wrapped.close)  # the module may be trained again
        return wrapped

    def _wrap_locally(self, whole: nn.Module) -> nn.Module:
        """The module with which local updates are made: itself, or wrapped for the ranks that average gradients."""
        assert self.local is not None
        group = self.local.group
        self.num_averaged = 1 if group is None else group.world_size
        return whole if group is None else self._wrap_by_own(whole, group)

    def _wrap_by_ddp(self, whole: nn.Module) -> nn.Module:
        """DistributedDataParallel of a module as it is now; it does not notice changes itself."""
        self._live = LiveParameters(whole)
        # It cannot send sparse and quantized tensors. All ranks have them from the spec.
        special = [
            name
            for name, tensor in (*whole.named_buffers(), *whole.named_parameters())
            if tensor.is_quantized or tensor.layout != torch.strided
        ]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(whole, special)
        return DistributedDataParallel(
            whole,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._finds_unused,
        )

    def take_up_changes(self) -> None:
        """Take up layers that were added or replaced, and parameters that were frozen or unfrozen. Collective."""
        if self.local is not None:
            self.local.take_up_changes()
        if isinstance(self.called, DataParallel):
            self.called.take_up_changes()
        if isinstance(self.called, DistributedDataParallel) and self._live.look():
            self.called = self._wrap_by_ddp(self.called.module)

    def begin(self) -> None:
        """Begin with the weights that the module has now, such as those of a checkpoint."""
        if self.local is not None:
            self.local.begin()
            self._begin_local_updates()

    def after_update(self, *, ends_epoch: bool, is_due: bool) -> bool:
        """Synchronize the ranks after an update if it is time; return whether all have the same weights. Collective.

        Ranks that overlap their reductions never have the same weights within an epoch, unless a checkpoint is due:
        then they wait for the average when they would have sent their progress.
        """
        if self.local is None:
            return True
        is_synchronized = self.local.after_step(ends=ends_epoch, waits=is_due)
        self._begin_local_updates()
        return is_synchronized

    def rank_state(self) -> dict[str, Any]:
        """What this rank has not sent yet of its gradients."""
        return (
            {"compression": self.called.compression_state()} if isinstance(self.called, DataParallel) else {}
        )

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`rank_state` returned on this rank."""
        if isinstance(self.called, DataParallel):
            self.called.load_compression_state(state.get("compression", {}))

    def _begin_local_updates(self) -> None:
        """Average no more gradients of all ranks, if local updates have just begun."""
        if (
            self.is_local
            and self.num_averaged == self.num_ranks > 1
            and isinstance(self.called, DataParallel)
        ):
            self.called.close()
            self.called = self._wrap_locally(self.called.module)

    def without_averaging(self) -> AbstractContextManager[Any]:
        """Within this context gradients stay local, to be averaged together with later ones."""
        if self.num_averaged == 1:
            return nullcontext()
        assert isinstance(self.called, (DataParallel, DistributedDataParallel))
        return self.called.no_sync()

    @contextmanager
    def without_rows(self) -> Iterator[None]:
        """Context for the step of a rank without rows, whose loss is multiplied by 0.

        A user's step is not called, unless it calls collectives. On GPUs, with DistributedDataParallel, parameters that
        only this pass uses get zero gradients.
        """
        idle = self._step if self._step is not None and not self._step.has_collectives else None
        with self.called.uncounted() if isinstance(self.called, DataParallel) else nullcontext():
            if idle is not None:
                idle.is_idle = True
            yield
            if idle is not None:
                idle.is_idle = False

    def whole_module(self) -> nn.Module:
        """The trained module on CPU, in ``eval()`` mode."""
        module = self.module.to("cpu")
        for block in self._recomputed:
            del block.forward  # the object's attribute; its class has the original method
        if self._before is not None:  # return the module without float8 layers
            structure, others = self._before
            tensors = dict((*module.named_parameters(), *module.named_buffers()))
            module = join_module(
                structure, {**others, **{name: tensor.detach() for name, tensor in tensors.items()}}
            )
        return module.eval()


class DividedModel(ModelDistribution):
    """A module that is divided among all ranks, or among the ranks of each of several groups.

    Args:
        layout: layout of the ranks.
        spec: spec of the fit.
        device: device of this rank.
        resources: exit stack that gives the module its own BatchNorms back.

    Attributes:
        layout: layout of the ranks.
        structure: pickle of the module without its tensors, as it was before the fit.
    """

    is_divided = True

    def __init__(
        self, layout: RankLayout, spec: TrainingSpec, device: torch.device, resources: ExitStack
    ) -> None:
        self.layout, self._device = layout, device
        self.name = repr(layout)
        self.structure, self._others = _take_apart(spec.model)
        if spec.precision == "float8":
            use_float8(spec.model, device)
        self.rank, self.num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.sharers = layout.communicator("data"), layout.ranks("data")
        self.reader, self.num_readers = layout.row_reader
        self.num_averaged = layout.size("data", "shard", "context")
        self.generator_index = layout.rank("pipeline", "data", "shard", "context")
        self.counts_rows = self.counts_outputs = layout.rank("tensor", "context") == 0
        if spec.sync_batch_norm:
            resources.enter_context(synchronized_batch_norms(spec.model))
        self._divide(spec)
        self._layers = list(self.module.modules())

    def take_up_changes(self) -> None:
        """Refuse layers that were added or replaced; frozen and unfrozen parameters need nothing.

        Raises:
            ParamError: if the layers are others than at the beginning of the fit.
        """
        if [*map(id, self.module.modules())] != [*map(id, self._layers)]:
            raise ParamError(
                "Layers were added or replaced during a fit with Param parallelism, whose ranks have parts of the "
                "model. Change the model before the fit, or leave out parallelism; layers may be frozen and unfrozen."
            )

    def _divide(self, spec: TrainingSpec) -> None:
        from sparkdl.parallel import parallelize

        self.module = self.parts = spec.model.train()
        # FSDP2 moves the module to a GPU block by block, so that the whole module is never there.
        self.evaluated = parallelize(self.module, self.layout, whole_outputs=True)
        place(self.module, spec, self._device)
        if spec.compile:
            self.module.compile()
        step = spec.user_step
        self.called = self.evaluated if step is None else StepModule(self.evaluated, step)

    def without_averaging(self) -> AbstractContextManager[Any]:
        """Within this context gradients stay local, to be averaged together with later ones."""
        from sparkdl.parallel import accumulated

        return accumulated(self.module) if self.num_averaged > 1 else nullcontext()

    def end_evaluation(self) -> None:
        """Let the module have its parts again: stages 1 and 2 keep gathered weights until a backward pass.

        Changes of those by a callback would be lost.
        """
        from torch.distributed.fsdp import FSDPModule

        for layer in self.module.modules():
            if isinstance(layer, FSDPModule):
                layer.reshard()

    def clip_gradients(self, max_norm: float) -> None:
        """Scale the gradients so that their joint norm over all ranks is at most ``max_norm``. Collective."""
        from sparkdl.parallel import clip_gradients

        clip_gradients(self.module, max_norm, self.layout)

    def other_tensors(self) -> dict[str, Tensor]:
        """Buffers, and tensors that are neither parameters nor buffers, on CPU; every rank gets all. Collective."""
        buffers = {name: buffer.detach().to("cpu") for name, buffer in self.module.named_buffers()}
        return {**self._others, **buffers}


def _num_operations(communicator: Communicator) -> int:
    measured, _ = communicator.telemetry.measure()
    return sum(total.num_operations for counts in measured for total in counts.totals.values())


def num_readers(spec: TrainingSpec, num_ranks: int) -> int:
    """Return the number of readers among ``num_ranks`` ranks."""
    if spec.parallelism is None or num_ranks == 1:
        return num_ranks
    sizes = spec.parallelism.resolve(num_ranks)
    assert sizes.data is not None, "resolved"
    return sizes.data * sizes.shard


def num_planned(spec: TrainingSpec, num_ranks: int) -> int:
    """Return for how many readers the rows of a fit that begins on ``num_ranks`` ranks are planned.

    A layout that the planner chooses does not change the rows of a step: each reader takes those of several ranks.
    """
    return num_readers(spec, num_ranks) if spec.planner is None else num_ranks


def place(module: nn.Module, spec: TrainingSpec, device: torch.device) -> nn.Module:
    """Move a module, or this rank's part of it, to the device, and set its initial weights.

    Raises:
        ParamError: if it is not known how a layer draws its weights.
        SavedModelError: if the files of the weights are of another model.
        StoreError: if the files cannot be read.
    """
    is_offloaded = getattr(module, "is_offloaded", False)  # FSDP2 has placed it already
    target = "cpu" if is_offloaded else str(device)
    if spec.initial_weights is not None:
        from sparkdl.parallel import draw_weights, load_weights  # also for whole modules

        if spec.initial_weights == DRAWN:
            draw_weights(module, seed=spec.seed, device=target)
        else:
            load_weights(module, spec.initial_weights, seed=spec.seed, device=target)
    return module if is_offloaded else module.to(device)


def _take_apart(module: nn.Module) -> tuple[bytes, dict[str, Tensor]]:
    """Return the structure of a module, and its tensors that are neither parameters nor buffers."""
    structure, tensors = split_module(module, with_meta=True)
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return structure, {name: tensor.clone() for name, tensor in tensors.items() if name not in names}
