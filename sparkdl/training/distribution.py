"""How the ranks of a fit share its module: each has a replica, or a part as a Parallelism describes.

Runs on every *rank*. A rank is a *reader* of rows; those of a tensor or context group are the same reader.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparkdl.model.architecture import join_module, split_module
from sparkdl.torch import DataParallel, init_process_group, synchronized_batch_norms
from sparkdl.training.objective import StepModule
from sparkdl.training.update import use_float8

if TYPE_CHECKING:
    from contextlib import ExitStack

    from torch import Tensor

    from sparkdl.collective import Communicator
    from sparkdl.parallel import RankLayout, ShardedCheckpoints
    from sparkdl.training.spec import TrainingSpec


class Replicas:
    """Every rank trains the whole module on rows of its own; backward passes average the gradients.

    All ranks get the weights of rank 0.

    Args:
        spec: of the fit; its module is moved to the device, and trained.
        communicator: of all ranks.
        device: of this rank.
        resources: closes what wraps the module.

    Attributes:
        module: that is trained.
        called: what a training step calls: the module, or what wraps it.
        evaluated: what is called without gradients.
        rank: of all ranks.
        reader: the number of this rank among those that read rows of their own.
        num_readers: how many there are.
        counts_rows: whether this rank counts its rows, which others may have as well.
        num_averaged: over how many ranks gradients are averaged.
        num_generator: by which the rank's random numbers differ from those of others.
        name: of the layout; fits of the same one continue with each rank's own state.
        is_divided: whether a rank has only a part of the module, so that what is done to the whole is collective.
    """

    is_divided = False
    counts_rows = True

    def __init__(
        self, spec: TrainingSpec, communicator: Communicator, device: torch.device, resources: ExitStack
    ) -> None:
        self.module = spec.model.to(device).train()
        self._before: tuple[bytes, dict[str, Tensor]] | None = None
        if spec.precision == "float8":
            self._before = _take_apart(self.module)
            use_float8(self.module, device)
        self.rank = self.reader = self.num_generator = communicator.rank
        self.num_readers = self.num_averaged = communicator.world_size
        self.name = f"{communicator.world_size} replicas"
        self.called = self._wrap(spec, communicator, device, resources)
        self.evaluated = self.module

    def _wrap(
        self, spec: TrainingSpec, communicator: Communicator, device: torch.device, resources: ExitStack
    ) -> nn.Module:
        module = self.module
        if spec.sync_batch_norm and communicator.world_size > 1:
            resources.enter_context(synchronized_batch_norms(module))
        if spec.compile:
            module.compile()
        if communicator.world_size == 1:
            return module
        # Also for modules that use torch.distributed themselves, as SyncBatchNorm does.
        init_process_group(communicator, cuda=device.type == "cuda")
        whole = module if spec.user_step is None else StepModule(module, spec.user_step)
        if device.type == "cpu":
            wrapped = DataParallel(whole, communicator)
            resources.callback(wrapped.close)  # the module may be trained again
            return wrapped
        return DistributedDataParallel(
            whole,
            device_ids=[device],
            gradient_as_bucket_view=True,
            find_unused_parameters=spec.has_unused_parameters,
        )

    @property
    def parts(self) -> nn.Module | list[nn.Module]:
        """What this rank has of the module."""
        return self.module

    def open_checkpoints(self, url: str) -> ShardedCheckpoints | None:
        """Open the checkpoints of the parts of a module; None where ranks have none. Collective."""
        del url
        return None

    def without_averaging(self) -> AbstractContextManager[Any]:
        """Inside, gradients stay those of this rank, to be averaged with later ones."""
        if self.num_averaged == 1:
            return nullcontext()
        assert isinstance(self.called, (DataParallel, DistributedDataParallel))
        return self.called.no_sync()

    def clip_gradients(self, max_norm: float) -> None:
        """Scale the gradients so that their joint norm is at most this."""
        nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def whole_module(self) -> nn.Module | None:
        """The trained module on CPU, in ``eval()`` mode."""
        module = self.module.to("cpu")
        if self._before is not None:  # without the layers of float8
            structure, others = self._before
            tensors = dict((*module.named_parameters(), *module.named_buffers()))
            module = join_module(
                structure, {**others, **{name: each.detach() for name, each in tensors.items()}}
            )
        return module.eval()


class Parts(Replicas):
    """Ranks that share one module, or several groups of ranks that do.

    Args:
        layout: of the ranks.
        spec: of the fit.
        device: of this rank.

    Attributes:
        structure: the pickle of the module without its tensors, as it was before the fit.
    """

    is_divided = True

    def __init__(self, layout: RankLayout, spec: TrainingSpec, device: torch.device) -> None:
        from sparkdl.parallel import parallelize

        self._layout = layout
        self.name = repr(layout)
        self.structure, self._others = _take_apart(spec.model)
        self.module = spec.model.train()
        if spec.precision == "float8":
            use_float8(self.module, device)
        # FSDP2 moves the module to a GPU block by block, so that it never lies there whole.
        self.evaluated = parallelize(self.module, layout, whole_outputs=True)
        self.module.to(device)
        self.rank = torch.distributed.get_rank()
        self.reader, self.num_readers = layout.row_reader
        self.num_averaged = layout.size("data", "shard", "context")
        self.num_generator = layout.rank("pipeline", "data", "shard", "context")
        self.counts_rows = layout.rank("tensor", "context") == 0
        if spec.compile:
            self.module.compile()
        step = spec.user_step
        self.called = self.evaluated if step is None else StepModule(self.evaluated, step)

    def without_averaging(self) -> AbstractContextManager[Any]:
        """Inside, gradients stay those of this rank, to be averaged with later ones."""
        from sparkdl.parallel import accumulated

        return accumulated(self.module) if self.num_averaged > 1 else nullcontext()

    def open_checkpoints(self, url: str) -> ShardedCheckpoints | None:
        """Open the checkpoints of the parts of a module; None where ranks have none. Collective."""
        from sparkdl.parallel import ShardedCheckpoints

        return ShardedCheckpoints(url, self._layout)

    def clip_gradients(self, max_norm: float) -> None:
        """Scale the gradients so that their joint norm over all ranks is at most this. Collective."""
        from sparkdl.parallel import clip_gradients

        clip_gradients(self.module, max_norm, self._layout)

    def whole_module(self) -> nn.Module | None:
        """The trained module on CPU, in ``eval()`` mode, on rank 0; None elsewhere. Collective.

        One tensor after the other is gathered. Attributes that are no tensors are those before the fit.
        """
        is_kept = self.rank == 0
        tensors = self.other_tensors()
        for name, tensor in self.module.named_parameters():
            whole = whole_tensor(tensor.detach())
            if is_kept:
                tensors[name] = whole.to("cpu", copy=True)
        return join_module(self.structure, tensors).eval() if is_kept else None

    def other_tensors(self) -> dict[str, Tensor]:
        """Buffers, and tensors that are neither parameters nor buffers, on CPU: every rank has them whole."""
        buffers = {name: buffer.detach().to("cpu") for name, buffer in self.module.named_buffers()}
        return {**self._others, **buffers}

    def save_parameters(self, folder: str) -> None:
        """Write the parameters into a folder of the Store, of which no rank has all. Collective.

        Raises:
            StoreError: if it cannot be written.
        """
        from sparkdl.parallel import save_weights

        save_weights(self.module, folder, self._layout)


def distribute(
    spec: TrainingSpec, communicator: Communicator, device: torch.device, resources: ExitStack
) -> Replicas:
    """Place the module of a fit on the ranks. Collective.

    Raises:
        ParamError: if the sizes of the parallelism do not fit the ranks or the module.
    """
    if spec.parallelism is None or communicator.world_size == 1:
        return Replicas(spec, communicator, device, resources)
    sizes = spec.parallelism.resolve(communicator.world_size)
    if sizes.data == communicator.world_size:
        return Replicas(spec, communicator, device, resources)
    init_process_group(communicator, cuda=device.type == "cuda")
    return Parts(sizes.lay_out(device_type=device.type), spec, device)


def num_readers(spec: TrainingSpec, num_ranks: int) -> int:
    """How many of so many ranks read rows of their own."""
    if spec.parallelism is None or num_ranks == 1:
        return num_ranks
    sizes = spec.parallelism.resolve(num_ranks)
    assert sizes.data is not None, "resolved"
    return sizes.data * sizes.shard


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor whose part a rank has, or the tensor itself if it has all of it. Collective for parts."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def _take_apart(module: nn.Module) -> tuple[bytes, dict[str, Tensor]]:
    """The structure of a module, and those of its tensors that are neither parameters nor buffers."""
    structure, tensors = split_module(module)
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return structure, {name: tensor.clone() for name, tensor in tensors.items() if name not in names}
