"""Pipeline parallelism in a fit: each rank has some layers of the module, the stages of a pipeline."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparkdl.errors import ParamError
from sparkdl.model.losses import LossTerm
from sparkdl.torch.buffers import plain_parts
from sparkdl.training.distribution import DividedModel, num_planned, place
from sparkdl.training.objective import Evaluation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from sparkdl.parallel import Pipeline
    from sparkdl.training.objective import Batch, Objective
    from sparkdl.training.spec import TrainingSpec


class Stages(DividedModel):
    """Distribution in which each rank has some layers of the module, or a part of those layers.

    A batch goes through the pipeline in microbatches, which have to be of one shape for torch's schedules: the last
    batch of an epoch is padded with rows that do not count. The rank of the last stage computes the loss.
    """

    def _divide(self, spec: TrainingSpec) -> None:
        from sparkdl.parallel import SCHEDULES, cut, num_microbatches, parallelize, stages_of_rank
        from sparkdl.parallel.pipeline.schedules import ranks_of_stages
        from sparkdl.parallel.tensor.plan import plan_of_stage, plan_with_whole_outputs

        layout, sizes = self.layout, self.layout.sizes
        group = layout.group("pipeline")
        self._inputs = spec.inputs
        self._num_rows = spec.batch_size * num_planned(spec, self.num_ranks) // self.num_readers
        self._microbatches = num_microbatches(sizes, self._num_rows)
        self._names = list(inspect.signature(spec.model.forward).parameters)
        numbers = stages_of_rank(sizes.schedule, layout.rank("pipeline"), sizes.pipeline)
        owners = ranks_of_stages(sizes.schedule, sizes.pipeline)
        last, self._rank_of_last = len(owners) - 1, layout.ranks("pipeline")[owners[-1]]
        # FSDP2 does not support schedules that split the backward pass.
        self._averages_itself = SCHEDULES[sizes.schedule].splits_backward and self.num_averaged > 1
        self._shares_weights = self.num_averaged > 1 and not self._averages_itself
        self._is_last_of_update = True
        plan: dict[str, str] = {}
        if sizes.tensor > 1:  # before layers that belong together may be cut apart
            plan = plan_with_whole_outputs(spec.model, sizes.tensor)
        self.parts = stages = cut(
            spec.model.train(), group, schedule=sizes.schedule, stage_blocks=sizes.stage_blocks
        )
        self._called = list[nn.Module]()
        for number, stage in zip(numbers, stages, strict=True):
            if number != last:
                stage.positions_dim = 1  # type: ignore[assignment]  # modules take any attribute
            self._called.append(
                parallelize(
                    stage,
                    layout,
                    plan=plan_of_stage(plan, stage),
                    whole_outputs=True,
                    averaged=not self._averages_itself,
                )
            )
            place(stage, spec, self._device)
        self.module = self.called = self.evaluated = _Layers(stages)
        is_first_of_rows = self.counts_rows
        self.counts_rows = is_first_of_rows and 0 in numbers
        self.counts_outputs = is_first_of_rows and last in numbers
        self._pipelines: OrderedDict[Any, Pipeline] = OrderedDict()

    def forward_backward(
        self,
        objective: Objective,
        batch: Batch,
        *,
        scaled: Callable[[LossTerm], Tensor],
        check: Callable[[Tensor], None] = lambda _: None,
    ) -> Evaluation:
        """Apply the module to a batch, and accumulate the gradients of its loss. Collective.

        The result has outputs on the rank of the last stage only; the loss is the same on all ranks of the pipeline.
        """
        evaluation = self._run(objective, batch, scaled)
        check(evaluation.term.mean)
        if self._averages_itself and self._is_last_of_update:
            from sparkdl.parallel import average_gradients

            group = self.layout.group("data", "shard", "context")
            average_gradients(self.module.parameters(), group, verify=self.layout.sizes.verify)
        return evaluation

    def evaluate(self, objective: Objective, batch: Batch) -> Evaluation:
        """Apply the module to a batch without gradients; the result is as in :meth:`forward_backward`. Collective."""
        from sparkdl.parallel import evaluate_stages

        num_rows, (first, others) = objective.num_rows(batch), self._filled_tensors(batch)
        group, schedule = self.layout.group("pipeline"), self.layout.sizes.schedule
        with objective.precision.computing():
            outputs = evaluate_stages(
                self._called, group, first, schedule=schedule, microbatches=self._microbatches, **others
            )
        return self._with_loss_of_all(
            [] if outputs is None else [objective.compare(outputs[:num_rows], batch)]
        )

    def share_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Broadcast the buffers of each stage from its first rank to its other ranks. Collective."""
        dimensions = ("data", "shard", "context", "tensor")
        if self.layout.size(*dimensions) > 1:
            group = self.layout.group(*dimensions)
            for buffer in buffers:
                for part in plain_parts(buffer):
                    torch.distributed.broadcast(part, self.layout.ranks(*dimensions)[0], group=group)

    @contextmanager
    def without_averaging(self) -> Iterator[None]:
        """Within this context gradients may stay local, to be averaged together with later ones."""
        self._is_last_of_update = False
        try:
            yield
        finally:
            self._is_last_of_update = True

    def other_tensors(self) -> dict[str, Tensor]:
        """Buffers, and tensors that are neither parameters nor buffers, on CPU. Collective.

        Rank 0 gets those of all stages.
        """
        buffers = {name: buffer.detach().to("cpu") for name, buffer in self.module.named_buffers()}
        return self._others | self._on_rank_0(buffers)

    def _on_rank_0(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all stages on rank 0; an empty dict on other ranks. Collective."""
        if 0 not in self.layout.ranks("pipeline"):
            return {}
        gathered: list[Any] = [{}] * self.layout.size("pipeline")
        is_kept = self.rank == 0
        torch.distributed.gather_object(
            tensors, gathered if is_kept else None, dst=0, group=self.layout.group("pipeline")
        )
        return {name: tensor for stage in gathered for name, tensor in stage.items()} if is_kept else {}

    def _run(self, objective: Objective, batch: Batch, scaled: Callable[[LossTerm], Tensor]) -> Evaluation:
        num_rows, evaluations = objective.num_rows(batch), list[Evaluation | None]()

        def compare(output: Any, target: Tensor) -> Tensor:
            """The scaled loss of a microbatch; the target holds the indices of its rows in the batch."""
            tensor = _one_tensor(output)
            first, end = int(target[0]), min(int(target[-1]) + 1, num_rows)
            if end <= first:
                evaluations.append(None)
                return tensor.sum() * 0.0
            one = objective.compare(
                tensor[: end - first], {name: values[first:end] for name, values in batch.items()}
            )
            evaluations.append(one)
            return scaled(one.term)

        first, others = self._filled_tensors(batch)
        self._compare: Callable[[Any, Tensor], Tensor] = compare
        pipeline = self._pipeline((first.shape, *(tensor.shape for tensor in others.values())))
        with objective.precision.computing():
            pipeline.run(first, target=torch.arange(len(first)), **others)
        # torch also calls compare() to infer shapes.
        return self._with_loss_of_all(
            [evaluation for evaluation in evaluations[-pipeline.microbatches :] if evaluation is not None]
        )

    def _filled_tensors(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The module's first argument (in later stages, the previous stage's output replaces it), and the others.

        The tensors have as many rows as a full batch, or more where a fit resumes on fewer ranks.
        """
        tensors = self._inputs.tensors(batch, self._device)
        num_rows = max(self._num_rows, *map(len, tensors.values()))
        num_rows += -num_rows % self._microbatches
        for name, tensor in tensors.items():
            if missing := num_rows - len(tensor):  # the last row repeated
                tensors[name] = torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])
        if self._inputs.given_by != "name":
            tensors = dict(zip(self._names, tensors.values(), strict=False))
        return tensors.pop(self._names[0]), tensors

    def _with_loss_of_all(self, found: Sequence[Evaluation]) -> Evaluation:
        """The evaluation of all microbatches on the rank of the last stage; on other ranks its loss alone."""
        loss = torch.zeros(2, dtype=torch.float64, device=self._device)
        for one in found:
            weight = one.term.weight
            loss += torch.stack([one.term.mean.detach().double() * weight, loss.new_tensor(weight)])
        torch.distributed.broadcast(loss, self._rank_of_last, group=self.layout.group("pipeline"))
        weight = float(loss[1])
        mean = (loss[0] / weight if weight else loss[0]).float()
        term = LossTerm(mean=mean, weight=weight)
        if not found:
            return Evaluation(None, None, term)
        outputs = torch.cat([part.outputs.detach() for part in found])
        return Evaluation(outputs, torch.cat([part.targets for part in found]), term)

    def _pipeline(self, key: Any) -> Pipeline:
        """The pipeline for inputs of some shapes. Collective.

        A new pipeline makes a trial run of its stages. Ranks that share the weights of a stage do this together: if
        one of them has no pipeline for its shapes, all of them make new ones.
        """
        from sparkdl.parallel import Pipeline

        pipeline = self._pipelines.pop(key, None)
        if self._shares_weights:
            lacking = torch.tensor(pipeline is None, dtype=torch.int64, device=self._device)
            torch.distributed.all_reduce(
                lacking, torch.distributed.ReduceOp.MAX, self.layout.group("data", "shard", "context")
            )
            pipeline = None if lacking else pipeline
        if pipeline is None:
            pipeline = Pipeline(
                self._called,
                self.layout.group("pipeline"),
                schedule=self.layout.sizes.schedule,
                microbatches=self._microbatches,
                loss=lambda output, target: self._compare(output, target),  # noqa: PLW0108 - changes with the batch
                sums=True,
                device=self._device,
                verify=self.layout.sizes.verify,
            )
        self._pipelines[key] = pipeline
        if len(self._pipelines) > _MOST_PIPELINES:
            self._pipelines.popitem(last=False)
        return pipeline


_MOST_PIPELINES = 16
"""Maximum number of input shapes for which pipelines, with their buffers between stages, are kept."""


class _Layers(nn.Module):
    """The stages of a rank as one module; its tensors have their names in the whole module."""

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
            name: value for stage in self.stages for name, value in stage.state_dict(*args, **kwargs).items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load into each stage its part of a state."""
        for stage in self.stages:
            stage.load_state_dict({name: state_dict[name] for name in stage.state_dict()}, *args, **kwargs)


def _one_tensor(output: Any) -> Tensor:
    if not isinstance(output, torch.Tensor):
        raise ParamError(
            f"Param model returned a {type(output).__name__}, and pipeline stages pass on one tensor. Have forward "
            "return the tensor that the loss takes, or use shard in place of pipeline."
        )
    return output
