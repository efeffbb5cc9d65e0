"""How the ranks of a fit share its module: each has a replica, or a part as a Parallelism describes.

Runs on every *rank*. A rank is a *reader* of rows; those of a tensor or context group are the same reader.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparkdl.errors import ParamError
from sparkdl.model.architecture import join_module, split_module
from sparkdl.model.heads import LossTerm
from sparkdl.torch import DataParallel, init_process_group, synchronized_batch_norms
from sparkdl.training.objective import Evaluation, StepModule
from sparkdl.training.spec import DRAWN
from sparkdl.training.update import use_float8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import ExitStack

    from torch import Tensor

    from sparkdl.collective import Communicator
    from sparkdl.parallel import Pipeline, RankLayout, ShardedCheckpoints
    from sparkdl.training.objective import Batch, Objective
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
        rank: of this process.
        num_ranks: of the fit.
        reader: the number of this rank among those that read rows of their own.
        num_readers: how many there are.
        counts_rows: whether this rank counts its rows, which others may have as well.
        counts_outputs: whether this rank counts what the module made of its rows.
        num_averaged: over how many ranks gradients are averaged.
        num_generator: by which the rank's random numbers differ from those of others.
        name: of the layout; fits of the same one continue with each rank's own state.
        is_divided: whether a rank has only a part of the module, so that what is done to the whole is collective.
    """

    is_divided = False
    counts_rows = counts_outputs = True

    def __init__(
        self, spec: TrainingSpec, communicator: Communicator, device: torch.device, resources: ExitStack
    ) -> None:
        self.module = _placed(spec.model, spec, device).train()
        self._before: tuple[bytes, dict[str, Tensor]] | None = None
        if spec.precision == "float8":
            self._before = _take_apart(self.module)
            use_float8(self.module, device)
        self.rank = self.reader = self.num_generator = communicator.rank
        self.num_ranks = self.num_readers = self.num_averaged = communicator.world_size
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

    def forward_backward(
        self,
        objective: Objective,
        batch: Batch,
        *,
        scaled: Callable[[LossTerm], Tensor],
        check: Callable[[Tensor], None] = lambda _: None,
    ) -> Evaluation:
        """Apply the module to a batch, and add the gradients of its loss. Collective where ranks share the module.

        Args:
            objective: of the fit.
            batch: prepared, of one row at least.
            scaled: returns of a loss what the gradients are of.
            check: is given the mean loss.
        """
        found = objective.evaluate(self.called, batch)
        check(found.term.mean)
        scaled(found.term).backward()
        return found

    def evaluate(self, objective: Objective, batch: Batch) -> Evaluation:
        """Apply the module to a batch without gradients. Collective where ranks share the module."""
        return objective.evaluate(self.evaluated, batch)

    def share_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Give all ranks what is in rank 0's buffers. Collective."""
        if self.num_ranks > 1:
            for buffer in buffers:
                torch.distributed.broadcast(buffer, 0)

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
        self._layout, self._device = layout, device
        self.name = repr(layout)
        self.structure, self._others = _take_apart(spec.model)
        if spec.precision == "float8":
            use_float8(spec.model, device)
        self.rank, self.num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.reader, self.num_readers = layout.row_reader
        self.num_averaged = layout.size("data", "shard", "context")
        self.num_generator = layout.rank("pipeline", "data", "shard", "context")
        self.counts_rows = self.counts_outputs = layout.rank("tensor", "context") == 0
        self._divide(spec)

    def _divide(self, spec: TrainingSpec) -> None:
        from sparkdl.parallel import parallelize

        self.module = spec.model.train()
        # FSDP2 moves the module to a GPU block by block, so that it never lies there whole.
        self.evaluated = parallelize(self.module, self._layout, whole_outputs=True)
        _placed(self.module, spec, self._device)
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
        """Buffers, and tensors that are neither parameters nor buffers, on CPU: every rank has all. Collective."""
        buffers = {name: buffer.detach().to("cpu") for name, buffer in self.module.named_buffers()}
        return {**self._others, **buffers}

    def save_parameters(self, folder: str) -> None:
        """Write the parameters into a folder of the Store, of which no rank has all. Collective.

        Raises:
            StoreError: if it cannot be written.
        """
        from sparkdl.parallel import save_weights

        save_weights(self.module, folder, self._layout)


class Stages(Parts):
    """Ranks of which each has some layers of the module, and maybe a part of those.

    A batch goes through the pipeline in small batches, which torch's schedules need to be of one shape: rows that are
    missing in the last one of an epoch are filled up, and count nothing. The rank of the last stage computes the loss.
    """

    def _divide(self, spec: TrainingSpec) -> None:
        from sparkdl.parallel import SCHEDULES, cut, num_microbatches, parallelize, stages_of_rank
        from sparkdl.parallel.tensor import plan_with_whole_outputs

        layout, sizes = self._layout, self._layout.sizes
        group = layout.group("pipeline")
        self._inputs, self._num_rows = spec.inputs, spec.batch_size
        self._microbatches = num_microbatches(sizes, spec.batch_size)
        self._names = list(inspect.signature(spec.model.forward).parameters)
        numbers = stages_of_rank(sizes.schedule, layout.rank("pipeline"), sizes.pipeline)
        last = sizes.pipeline * SCHEDULES[sizes.schedule].stages_per_rank - 1
        self._rank_of_last = next(
            rank
            for number, rank in enumerate(layout.ranks("pipeline"))
            if last in stages_of_rank(sizes.schedule, number, sizes.pipeline)
        )
        # FSDP2 does not support schedules that split the backward pass.
        self._averages_itself = SCHEDULES[sizes.schedule].splits_backward and self.num_averaged > 1
        self._shares_weights = self.num_averaged > 1 and not self._averages_itself
        self._is_last_of_update = True
        plan: dict[str, str] = {}
        if sizes.tensor > 1:  # before layers that belong together may be cut apart
            plan = plan_with_whole_outputs(spec.model, sizes.tensor)
        self._stages, self._called = cut(spec.model.train(), group, schedule=sizes.schedule), []
        for number, stage in zip(numbers, self._stages, strict=True):
            if number != last:
                stage.positions_dim = 1  # type: ignore[assignment]  # modules take any attribute
            names = dict(stage.named_modules())
            self._called.append(
                parallelize(
                    stage,
                    layout,
                    plan={name: style for name, style in plan.items() if name in names},
                    whole_outputs=True,
                    averaged=not self._averages_itself,
                )
            )
            _placed(stage, spec, self._device)
        self.module = self.called = self.evaluated = _Layers(self._stages)
        is_first_of_rows = self.counts_rows
        self.counts_rows = is_first_of_rows and 0 in numbers
        self.counts_outputs = is_first_of_rows and last in numbers
        self._pipelines: OrderedDict[Any, Pipeline] = OrderedDict()

    @property
    def parts(self) -> nn.Module | list[nn.Module]:
        """What this rank has of the module."""
        return self._stages

    def forward_backward(
        self,
        objective: Objective,
        batch: Batch,
        *,
        scaled: Callable[[LossTerm], Tensor],
        check: Callable[[Tensor], None] = lambda _: None,
    ) -> Evaluation:
        """Apply the module to a batch, and add the gradients of its loss. Collective.

        The result has outputs on the rank of the last stage only; the loss is the same on all ranks of the pipeline.
        """
        found = self._run(objective, batch, scaled)
        check(found.term.mean)
        if self._averages_itself and self._is_last_of_update:
            from sparkdl.parallel import average_gradients

            average_gradients(self.module.parameters(), self._layout.group("data", "shard", "context"))
        return found

    def evaluate(self, objective: Objective, batch: Batch) -> Evaluation:
        """Apply the module to a batch without gradients, with the result of :meth:`forward_backward`. Collective."""
        from sparkdl.parallel import evaluate_stages

        num_rows, (first, others) = objective.num_rows(batch), self._filled_tensors(batch)
        group, schedule = self._layout.group("pipeline"), self._layout.sizes.schedule
        with objective.precision.computing():
            outputs = evaluate_stages(
                self._called, group, first, schedule=schedule, microbatches=self._microbatches, **others
            )
        return self._told([] if outputs is None else [objective.compare(outputs[:num_rows], batch)])

    def share_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Give all ranks of a stage what is in the buffers of the first of them. Collective."""
        dimensions = ("data", "shard", "context", "tensor")
        if self._layout.size(*dimensions) > 1:
            group = self._layout.group(*dimensions)
            for buffer in buffers:
                torch.distributed.broadcast(buffer, self._layout.ranks(*dimensions)[0], group=group)

    @contextmanager
    def without_averaging(self) -> Iterator[None]:
        """Inside, gradients may stay those of this rank, to be averaged with later ones."""
        self._is_last_of_update = False
        try:
            yield
        finally:
            self._is_last_of_update = True

    def whole_module(self) -> nn.Module | None:
        """The trained module on CPU, in ``eval()`` mode, on rank 0; None elsewhere. Collective."""
        own = {name: whole_tensor(each.detach()).to("cpu") for name, each in self.module.named_parameters()}
        tensors = self.other_tensors() | self._on_rank_0(own)
        return join_module(self.structure, tensors).eval() if self.rank == 0 else None

    def other_tensors(self) -> dict[str, Tensor]:
        """Buffers, and tensors that are neither parameters nor buffers, on CPU: on rank 0 all of them. Collective."""
        buffers = {name: buffer.detach().to("cpu") for name, buffer in self.module.named_buffers()}
        return self._others | self._on_rank_0(buffers)

    def save_parameters(self, folder: str) -> None:
        """Write the parameters into a folder of the Store, of which no rank has all. Collective.

        Raises:
            StoreError: if it cannot be written.
        """
        from sparkdl.parallel import save_weights

        save_weights(self._stages, folder, self._layout)

    def _on_rank_0(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all stages on rank 0, nothing elsewhere. Collective."""
        if 0 not in self._layout.ranks("pipeline"):
            return {}
        gathered: list[Any] = [{}] * self._layout.size("pipeline")
        is_kept = self.rank == 0
        torch.distributed.gather_object(
            tensors, gathered if is_kept else None, dst=0, group=self._layout.group("pipeline")
        )
        return {name: each for stage in gathered for name, each in stage.items()} if is_kept else {}

    def _run(self, objective: Objective, batch: Batch, scaled: Callable[[LossTerm], Tensor]) -> Evaluation:
        num_rows, found = objective.num_rows(batch), list[Evaluation | None]()

        def compare(output: Any, target: Tensor) -> Tensor:
            """The loss of a small batch, of the rows whose numbers are the target."""
            tensor = _one_tensor(output)
            first, end = int(target[0]), min(int(target[-1]) + 1, num_rows)
            if end <= first:
                found.append(None)
                return tensor.sum() * 0.0
            one = objective.compare(
                tensor[: end - first], {name: values[first:end] for name, values in batch.items()}
            )
            found.append(one)
            return scaled(one.term)

        first, others = self._filled_tensors(batch)
        self._compare: Callable[[Any, Tensor], Tensor] = compare
        pipeline, is_new = self._pipeline((first.shape, *(each.shape for each in others.values())))
        with objective.precision.computing(), self._gradients_apart() if is_new else nullcontext():
            pipeline.run(first, target=torch.arange(len(first)), **others)
        # Torch also calls it to learn shapes.
        return self._told([each for each in found[-pipeline.microbatches :] if each is not None])

    def _filled_tensors(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The first argument of the module, for which stages take what the one before returns, and the others.

        They have as many rows as full batches, or more where a fit resumes on fewer ranks.
        """
        tensors = self._inputs.tensors(batch, self._device)
        num_rows = max(self._num_rows, *map(len, tensors.values()))
        num_rows += -num_rows % self._microbatches
        tensors = {name: _filled_up(each, num_rows) for name, each in tensors.items()}
        if self._inputs.given_by != "name":
            tensors = dict(zip(self._names, tensors.values(), strict=False))
        return tensors.pop(self._names[0]), tensors

    def _told(self, found: Sequence[Evaluation]) -> Evaluation:
        """What the last stage made of all small batches; of others, the loss."""
        loss = torch.zeros(2, dtype=torch.float64, device=self._device)
        for one in found:
            weight = one.term.weight
            loss += torch.stack([one.term.mean.detach().double() * weight, loss.new_tensor(weight)])
        torch.distributed.broadcast(loss, self._rank_of_last, group=self._layout.group("pipeline"))
        weight = float(loss[1])
        mean = (loss[0] / weight if weight else loss[0]).float()
        return _joined(found, LossTerm(mean=mean, weight=weight))

    @contextmanager
    def _gradients_apart(self) -> Iterator[None]:
        """Add gradients that there are after this block: a new pipeline tries its stages, which clears them."""
        kept = [(each, each.grad) for each in self.module.parameters() if each.grad is not None]
        for parameter, _ in kept:
            parameter.grad = None
        yield
        for parameter, gradient in kept:
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad

    def _pipeline(self, key: Any) -> tuple[Pipeline, bool]:
        """The pipeline for inputs of some shapes, and whether it is new. Collective.

        A new one tries its stages. Ranks that share the weights of a stage do so together, whatever their shapes are.
        """
        from sparkdl.parallel import Pipeline

        found = self._pipelines.pop(key, None)
        if self._shares_weights:
            lacking = torch.tensor(found is None, dtype=torch.int64, device=self._device)
            torch.distributed.all_reduce(
                lacking, torch.distributed.ReduceOp.MAX, self._layout.group("data", "shard", "context")
            )
            found = None if lacking else found
        if is_new := found is None:
            found = Pipeline(
                self._called,
                self._layout.group("pipeline"),
                schedule=self._layout.sizes.schedule,
                microbatches=self._microbatches,
                loss=lambda output, target: self._compare(output, target),  # noqa: PLW0108 - that of the batch
                sums=True,
                device=self._device,
            )
        self._pipelines[key] = found
        if len(self._pipelines) > _MOST_PIPELINES:
            self._pipelines.popitem(last=False)
        return found, is_new


_MOST_PIPELINES = 16
"""How many shapes of inputs the buffers between stages are kept for."""


class _Layers(nn.Module):
    """The stages of a rank as one module, whose tensors have the names that they have in the whole one."""

    has_some_layers = True

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all stages."""
        for stage in self.stages:
            yield from stage.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of all stages."""
        for stage in self.stages:
            yield from stage.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # has overloads
        """Return the states of all stages."""
        return {
            name: each for stage in self.stages for name, each in stage.state_dict(*args, **kwargs).items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Give each stage its part of a state."""
        for stage in self.stages:
            stage.load_state_dict({name: state_dict[name] for name in stage.state_dict()}, *args, **kwargs)


def _one_tensor(output: Any) -> Tensor:
    if not isinstance(output, torch.Tensor):
        raise ParamError(
            f"Param model returned a {type(output).__name__}, and pipeline stages pass on one tensor. Have forward "
            "return the tensor that the loss takes, or use shard in place of pipeline."
        )
    return output


def _filled_up(tensor: Tensor, num_rows: int) -> Tensor:
    """The tensor with its last row repeated until there are so many."""
    missing = num_rows - len(tensor)
    return torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])]) if missing > 0 else tensor


def _joined(parts: Sequence[Evaluation], term: LossTerm) -> Evaluation:
    """What a module made of all small batches; without outputs on ranks that have none."""
    if not parts:
        return Evaluation(None, None, None, term)
    weights = [each.weights for each in parts if each.weights is not None]
    return Evaluation(
        torch.cat([each.outputs.detach() for each in parts]),
        torch.cat([each.targets for each in parts]),
        torch.cat(weights) if weights else None,
        term,
    )


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
    layout = sizes.lay_out(device_type=device.type)
    return (Parts if sizes.pipeline == 1 else Stages)(layout, spec, device)


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


def _placed(module: nn.Module, spec: TrainingSpec, device: torch.device) -> nn.Module:
    """Move a module or this rank's part of it to the device, with the weights that the fit begins with.

    Raises:
        ParamError: if it is not known how a layer draws its weights.
        SavedModelError: if the files of the weights are of another model.
        StoreError: if they cannot be read.
    """
    is_offloaded = getattr(module, "is_offloaded", False)  # so FSDP2 has placed it
    own = "cpu" if is_offloaded else str(device)
    if spec.initial_weights is not None:
        from sparkdl.parallel import draw_weights, load_weights  # whole modules have such weights, too

        if spec.initial_weights == DRAWN:
            draw_weights(module, seed=spec.seed, device=own)
        else:
            load_weights(module, spec.initial_weights, seed=spec.seed, device=own)
    return module if is_offloaded else module.to(device)


def _take_apart(module: nn.Module) -> tuple[bytes, dict[str, Tensor]]:
    """The structure of a module, and those of its tensors that are neither parameters nor buffers."""
    structure, tensors = split_module(module, with_meta=True)
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return structure, {name: tensor.clone() for name, tensor in tensors.items() if name not in names}
