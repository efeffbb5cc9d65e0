"""The execution of a pipeline's stages under a schedule of ``torch.distributed.pipelining``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.utils._pytree import tree_leaves

from sparkdl.errors import ParamError
from sparkdl.parallel.parallelism import SCHEDULES, check_sharded_schedule
from sparkdl.parallel.pipeline.schedules import (
    check_microbatches,
    ranks_of_stages,
    stages_of_rank,
)
from sparkdl.parallel.pipeline.tied import TiedGradients
from sparkdl.parallel.verify.verification import Verification, verifications_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _Stage(PipelineStage):
    """Stage that calls a function before its first microbatch, and is then checked if its backward pass is split."""

    on_first_microbatch: Callable[[], None] | None = None
    splits_backward = False

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        # Torch calls this for microbatches alone, and the module itself to learn shapes.
        is_first = self.on_first_microbatch is not None
        if self.on_first_microbatch is not None:
            self.on_first_microbatch()
            self.on_first_microbatch = None
        output = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]  # of torch
        if is_first and self.splits_backward:
            _check_path(args, output)
        return output


def _check_path(inputs: Sequence[Any], output: Any) -> None:
    """Check that a stage's output depends on its inputs, from which torch finds the weights whose gradients wait.

    Raises:
        ParamError: if no gradient reaches the inputs. Weights before the cut would get wrong gradients, or none.
    """
    leaves = {id(value) for value in inputs if isinstance(value, Tensor) and value.requires_grad}
    outputs = [value for value in tree_leaves(output) if isinstance(value, Tensor)]
    nodes: list[Any] = [value.grad_fn for value in outputs if value.grad_fn is not None]
    if not leaves or not nodes:
        return
    seen: set[Any] = set(nodes)
    while nodes:
        node = nodes.pop()
        if id(getattr(node, "variable", None)) in leaves:
            return
        following = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= following
        nodes += following
    others = [name for name, kind in SCHEDULES.items() if not kind.splits_backward]
    raise ParamError(
        "No gradient reaches the input of a pipeline stage: a block detaches what it gets, or runs under no_grad. A "
        f"schedule that splits the backward pass computes wrong gradients for it. Use one of {', '.join(others)}."
    )


class _Trial:
    """Undoes what a trial of stages with uninitialized memory changes: buffers, gradients and random numbers.

    Until then nothing is verified.
    """

    def __init__(self, stages: Sequence[nn.Module], verifications: Sequence[Verification]) -> None:
        self._verifications = verifications
        for verification in verifications:
            verification.is_paused = True
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for stage in stages
            for module in stage.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        parameters = [parameter for stage in stages for parameter in stage.parameters()]
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self._random = torch.get_rng_state()
        # Reading it would initialize CUDA in a rank that computes on the CPU.
        is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # of torch
        self._cuda = torch.cuda.get_rng_state() if is_used else None
        self._is_undone = False

    @torch.no_grad()
    def undo(self) -> None:
        """Restore all of this before the first microbatch, when all stages have been tried."""
        if self._is_undone:
            return
        self._is_undone = True
        for module, name, buffer, value in self._buffers:
            module._buffers[name] = buffer.copy_(value)
        self._buffers.clear()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients.clear()
        torch.set_rng_state(self._random)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        for verification in self._verifications:
            verification.is_paused = False


class Pipeline:
    """The stages of this rank under a schedule.

    Args:
        stages: stages that :func:`cut` returned; they may have been divided and sharded since.
        group: process group of the ranks of the pipeline.
        schedule: name of the schedule for which the stages were cut.
        microbatches: number of microbatches into which a batch is cut.
        loss: function that takes the outputs of the last stage and the target of a microbatch and returns the mean loss
            of the microbatch, or with ``sums`` its share of the batch's loss.
        sums: whether the loss of a batch is the sum of its microbatches' losses, in place of their mean.
        device: device of the tensors; the CPU if None.
        verify: whether ranks check in every step that they were given the same rows and that copies of tied parameters
            are equal; False for never, None for the first step. How these copies are divided is compared once in any
            case. What the stages themselves check is decided when they are prepared.

    Attributes:
        microbatches: number of microbatches into which a batch is cut.
        rank_of_last: global rank that has the last stage.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        group: dist.ProcessGroup,
        *,
        schedule: str,
        microbatches: int,
        loss: Callable[[Any, Any], Tensor],
        sums: bool = False,
        device: torch.device | None = None,
        verify: bool | None = None,
    ) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        numbers = stages_of_rank(schedule, rank, ranks)
        kind = SCHEDULES[schedule]
        if len(stages) != len(numbers):
            raise ParamError(
                f"The schedule {schedule!r} has {len(numbers)} stages per rank, got {len(stages)}. Cut the model for "
                "this schedule."
            )
        owners = ranks_of_stages(schedule, ranks)
        num_stages = len(owners)
        check_microbatches(schedule, ranks, microbatches)
        if any(isinstance(stage, FSDPModule) for stage in stages):
            check_sharded_schedule(schedule)
        self._group = group
        self.microbatches = microbatches
        self._has_first = 0 in numbers
        self._has_last = num_stages - 1 in numbers
        self.rank_of_last = dist.get_global_rank(group, owners[-1])
        self._device = device or torch.device("cpu")
        wrapped = [
            _Stage(stage, number, num_stages, self._device, group=group)
            for stage, number in zip(stages, numbers, strict=True)
        ]
        for stage in wrapped:
            stage.splits_backward = kind.splits_backward
        self._wrapped, self._is_tried = wrapped, False
        self._shapes: list[tuple[int, ...]] | None = None
        verification = Verification(None, group, verify, dimension="pipeline")
        # All stages of a rank work on the same rows.
        self._verifications_of_rows = [verification, *verifications_of(stages[0])]
        self._verifications = [
            *self._verifications_of_rows,
            *(verification for stage in stages[1:] for verification in verifications_of(stage)),
        ]
        self._tied = TiedGradients(stages, schedule, group, verification)
        parts = 1 if sums else microbatches
        made: Any = get_schedule_class(kind.name)
        # torch's own scaling would divide gradients accumulated by earlier steps once more.
        self._schedule = made(
            wrapped if issubclass(made, PipelineScheduleMulti) else wrapped[0],
            microbatches,
            loss_fn=lambda output, target: loss(output, target) / parts,
            scale_grads=False,
        )

    def step(self, *args: Any, target: Any, **kwargs: Any) -> Tensor:
        """Compute loss and gradients of a batch; the gradients are added to existing ones. Collective.

        Args:
            args: inputs of the model, with the rows of the batch first; used on the rank of the first stage. Ranks that
                are also given them, as all should be, check in verified steps that they were given the same ones.
            target: target of the loss; used on the rank of the last stage, and checked likewise.
            kwargs: keyword arguments of every stage, the same on all ranks.

        Returns:
            The loss of the batch, the same on all ranks, without gradients.

        Raises:
            ParamError: if the number of rows is not a multiple of the number of microbatches; on all ranks, if two
                of them were given different inputs or targets.
        """
        loss = self.run(*args, target=target, **kwargs)
        dist.broadcast(loss, self.rank_of_last, group=self._group)
        return loss

    def run(self, *args: Any, target: Any, **kwargs: Any) -> Tensor:
        """Do the same as :meth:`step` without broadcasting the loss: it is 0 on ranks without the last stage."""
        self._check_shapes([*args, target])  # on all ranks that get them, so that none waits for another
        for verification in self._verifications_of_rows:
            verification.check_rows(args, [target], [kwargs[name] for name in sorted(kwargs)])
        losses: list[Tensor] | None = [] if self._has_last else None
        refusal = trial = None
        try:
            with self._tied.summed():
                if not self._is_tried:
                    trial = _Trial([stage.submod for stage in self._wrapped], self._verifications)
                    for stage in self._wrapped:
                        stage.on_first_microbatch = trial.undo
                    self._is_tried = True
                self._schedule.step(
                    *(args if self._has_first else ()),
                    target=target if self._has_last else None,
                    losses=losses,
                    return_outputs=False,
                    **kwargs,
                )
        except RuntimeError as error:  # torch's wrapping of an error of a stage
            if not isinstance(error.__cause__, ParamError):
                raise
            refusal = error.__cause__
        finally:
            if trial is not None:
                trial.undo()  # if it failed before the first microbatch
        if refusal is not None:
            raise refusal
        for verification in self._verifications:
            verification.end_step()
        return torch.stack(losses).sum().detach().float() if losses else torch.zeros((), device=self._device)

    def _check_shapes(self, values: Sequence[Any]) -> None:
        """Check that a batch can be cut into microbatches, and has the shapes of the batches before."""
        shapes = [tuple(value.shape) for value in values if isinstance(value, Tensor)]
        for rows, *_ in shapes:
            if rows % self.microbatches:
                raise ParamError(
                    f"A batch of {rows} rows cannot be cut into {self.microbatches} microbatches of equally many rows. "
                    "Repeat rows that do not count, or leave them out."
                )
        self._shapes = shapes if self._shapes is None else self._shapes
        if shapes != self._shapes:
            raise ParamError(
                f"A pipeline got tensors of the shapes {shapes}, and {self._shapes} before. Make a Pipeline of the "
                "same stages for each shape."
            )


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
_HEADER = 16
"""Length of the header that describes a tensor: index of its dtype, number of its dimensions, and its shape."""


@torch.no_grad()
def evaluate_stages(
    stages: Sequence[nn.Module],
    group: dist.ProcessGroup,
    *args: Any,
    schedule: str,
    microbatches: int,
    **kwargs: Any,
) -> Tensor | None:
    """Compute the outputs of a batch without gradients. Collective.

    Args:
        stages: stages that :func:`cut` returned.
        group: process group of the ranks of the pipeline.
        args: inputs of the model, tensors with the rows of the batch first; used on the rank of the first stage.
        schedule: name of the schedule for which the stages were cut.
        microbatches: number of microbatches, of at least one row each, into which the batch is cut.
        kwargs: keyword arguments of every stage, tensors with the rows of the batch first, the same on all ranks.

    Returns:
        The outputs on the rank of the last stage, None on the others.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    owners, numbers = ranks_of_stages(schedule, ranks), stages_of_rank(schedule, rank, ranks)
    outputs, sent = [], list[Any]()
    parts = [torch.tensor_split(argument, microbatches) for argument in args]
    named = {name: torch.tensor_split(argument, microbatches) for name, argument in kwargs.items()}
    for index in range(microbatches):
        inputs: tuple[Any, ...] = tuple(part[index] for part in parts)
        for number, stage in zip(numbers, stages, strict=True):
            if number and owners[number - 1] != rank:
                device = next((parameter.device for parameter in stage.parameters()), torch.device("cpu"))
                inputs = (_receive(owners[number - 1], group, device),)
            output = stage(*inputs, **{name: part[index] for name, part in named.items()})
            if number == len(owners) - 1:
                outputs.append(output)
            elif owners[number + 1] != rank:
                sent += _send(output, owners[number + 1], group)
            inputs = (output,)
    for work, _ in sent:
        work.wait()
    return torch.cat(outputs) if outputs else None


def _send(tensor: Tensor, to: int, group: dist.ProcessGroup) -> list[tuple[Any, Tensor]]:
    """Begin to send a header and a tensor; the caller keeps the returned works and tensors until they are done."""
    tensor = tensor.contiguous()
    header = torch.zeros(_HEADER, dtype=torch.int64, device=tensor.device)
    if tensor.dtype not in _DTYPES or tensor.ndim > _HEADER - 2:
        raise ParamError(
            f"A pipeline stage returned a tensor of {tensor.dtype} with {tensor.ndim} dimensions. Between stages go "
            f"tensors of up to {_HEADER - 2} dimensions of {', '.join(map(str, _DTYPES))}."
        )
    known = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    header[: len(known)] = torch.tensor(known)
    return [(dist.isend(message, group=group, group_dst=to), message) for message in (header, tensor)]


def _receive(source: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    header = torch.zeros(_HEADER, dtype=torch.int64, device=device)
    dist.recv(header, group=group, group_src=source)
    kind, ndim, *shape = header.tolist()
    tensor = torch.empty(shape[:ndim], dtype=_DTYPES[kind], device=device)
    dist.recv(tensor, group=group, group_src=source)
    return tensor
