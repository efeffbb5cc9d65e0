"""Pipeline parallelism: the stages of a model, which work on microbatches one after the other.

:class:`Pipeline` runs a schedule of ``torch.distributed.pipelining`` over the stages into which
:func:`sparkdl.parallel.pipeline_cut.cut` has cut a model.

Sources: Y. Huang et al., "GPipe" (2019); D. Narayanan et al., "PipeDream" (2019) and "Efficient Large-Scale Language
Model Training on GPU Clusters" (2021), for 1F1B and its interleaved form; P. Qi et al., "Zero Bubble Pipeline
Parallelism" (2023), for the zero-bubble schedules.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor

from sparkdl.errors import ParamError
from sparkdl.parallel.tensor_checks import begin_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sparkdl.parallel.parallelism import Parallelism


@dataclass(frozen=True)
class _Schedule:
    name: str
    stages_per_rank: int
    splits_backward: bool = False
    """Whether the gradients of weights are computed later than those of inputs."""
    is_v: bool = False
    """Whether rank r of N has the stages r and 2 N - 1 - r, in place of r and N + r."""


SCHEDULES = {
    "gpipe": _Schedule("GPipe", 1),
    "1f1b": _Schedule("1F1B", 1),
    "interleaved-1f1b": _Schedule("Interleaved1F1B", 2),
    "looped-bfs": _Schedule("LoopedBFS", 2),
    "zero-bubble": _Schedule("InterleavedZeroBubble", 2, splits_backward=True),
    "zbv": _Schedule("ZBVZeroBubble", 2, splits_backward=True, is_v=True),
    "dualpipe-v": _Schedule("DualPipeV", 2, splits_backward=True, is_v=True),
}
"""Schedules by name. All compute the same numbers; they differ in idle time and in the activations that they keep."""


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several stages have, such as the weights that an embedding and a head share.

    Each stage has a copy under the first name, in a module with ``is_elsewhere`` if that module is another stage's.

    Attributes:
        name: first name of the parameter in the whole model.
        names: all of its names in the whole model.
        stages: numbers of the stages that have it, in ascending order.
    """

    name: str
    names: tuple[str, ...]
    stages: tuple[int, ...]


def stages_of_rank(schedule: str, rank: int, ranks: int) -> list[int]:
    """Numbers of the stages that a rank of a pipeline has.

    Raises:
        ParamError: if there is no such schedule.
    """
    if schedule not in SCHEDULES:
        raise ParamError(f"There is no pipeline schedule {schedule!r}; there are {', '.join(SCHEDULES)}.")
    kind = SCHEDULES[schedule]
    if kind.is_v:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + number * ranks for number in range(kind.stages_per_rank)]


def num_microbatches(sizes: Parallelism, rows: int) -> int:
    """Number of microbatches of equally many rows into which a pipeline cuts a batch; see :class:`Parallelism`.

    Args:
        sizes: resolved sizes.
        rows: number of rows of a batch.

    Raises:
        ParamError: if there is no such number.
    """
    least = _least_microbatches(sizes.schedule, sizes.pipeline)
    if sizes.microbatches is not None:
        _check_microbatches(sizes.schedule, sizes.pipeline, sizes.microbatches)
        if rows % sizes.microbatches:
            raise ParamError(
                f"Batches of {rows} rows cannot be cut into {sizes.microbatches} small batches of equally many rows. "
                "Choose a batch size that is a multiple of microbatches."
            )
        return sizes.microbatches
    fits = [number for number in range(least, 4 * sizes.pipeline + 1) if rows % number == 0]
    if not fits:
        raise ParamError(
            f"Batches of {rows} rows cannot be cut into {least} to {4 * sizes.pipeline} small batches of equally many "
            f"rows, as {sizes.pipeline} pipeline ranks with the schedule {sizes.schedule!r} need them. Choose a batch "
            f"size such as {4 * sizes.pipeline}."
        )
    return fits[-1]


def _least_microbatches(schedule: str, ranks: int) -> int:
    return 2 * ranks if schedule == "dualpipe-v" else ranks if schedule == "1f1b" else 1


def _check_microbatches(schedule: str, ranks: int, microbatches: int) -> None:
    least = _least_microbatches(schedule, ranks)
    if microbatches < least:
        raise ParamError(
            f"The schedule {schedule!r} on {ranks} pipeline ranks needs at least {least} small batches, got "
            f"{microbatches}."
        )


class _Stage(PipelineStage):
    """A stage that tells when its first microbatch comes."""

    on_first_microbatch: Callable[[], None] | None = None

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        # Torch calls this for microbatches alone, and the module itself to learn shapes.
        if self.on_first_microbatch is not None:
            self.on_first_microbatch()
            self.on_first_microbatch = None
        return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]  # of torch


class _Trial:
    """Undoes what a trial of stages with uninitialized memory changes: buffers and the state of random numbers."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        self._stages = stages
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for stage in stages
            for module in stage.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._random = torch.get_rng_state()
        # Reading it would initialize CUDA in a rank that computes on the CPU.
        is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # of torch
        self._cuda = torch.cuda.get_rng_state() if is_used else None
        self._is_undone = False

    @torch.no_grad()
    def undo(self) -> None:
        """Undo it before the first microbatch of any stage, when all stages have been tried."""
        if self._is_undone:
            return
        self._is_undone = True
        for module, name, buffer, value in self._buffers:
            module._buffers[name] = buffer.copy_(value)
        self._buffers.clear()
        torch.set_rng_state(self._random)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        for stage in self._stages:
            begin_checks(stage)


class _TiedGradients:
    """Sums the gradients of parameters that several stages have, so that all copies of one stay equal.

    Args:
        stages: stages of this rank, in ascending order.
        schedule: name of the schedule for which they were cut.
        group: process group of the ranks of the pipeline.
    """

    def __init__(self, stages: Sequence[nn.Module], schedule: str, group: dist.ProcessGroup) -> None:
        self._stages, self._group = stages, group
        self._rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._numbers = stages_of_rank(schedule, self._rank, ranks)
        owners = {number: each for each in range(ranks) for number in stages_of_rank(schedule, each, ranks)}
        self._ties = _tied_parameters(stages[0])
        self._holders = {tie.name: [owners[number] for number in tie.stages] for tie in self._ties}
        self._are_compared = not self._ties

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Context whose backward passes add to each copy the gradients of all copies. Collective."""
        copies = {tie.name: self._copies(tie) for tie in self._ties}
        earlier = [(each, each.grad) for own in copies.values() for each in own.values()]
        for parameter, _ in earlier:
            parameter.grad = None
        yield
        if not self._are_compared:
            self._compare(copies)
            self._are_compared = True
        for tie in self._ties:
            self._sum(tie, copies[tie.name])
        for parameter, gradient in earlier:
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad

    def _copies(self, tie: TiedParameter) -> dict[int, nn.Parameter]:
        """This rank's copies of a parameter that is trained, by the number of the stage."""
        found = {
            number: _find_parameter(stage, tie.name)
            for number, stage in zip(self._numbers, self._stages, strict=True)
            if number in tie.stages
        }
        return {number: each for number, each in found.items() if each.requires_grad}

    def _sum(self, tie: TiedParameter, copies: Mapping[int, nn.Parameter]) -> None:
        own = {number: each.grad for number, each in copies.items()}
        like = next((grad for grad in own.values() if grad is not None), None)
        if like is None:  # frozen, or FSDP2 accumulates the gradients of all copies
            return
        if any(grad is None for grad in own.values()):
            own = {number: torch.zeros_like(like) if grad is None else grad for number, grad in own.items()}
        local = {number: _local(grad).contiguous() for number, grad in own.items() if grad is not None}
        others = {
            number: torch.empty_like(_local(like))
            for number, rank in zip(tie.stages, self._holders[tie.name], strict=True)
            if rank != self._rank
        }
        transfers = []
        for number, rank in zip(tie.stages, self._holders[tie.name], strict=True):
            if number in others:
                transfers.append(dist.P2POp(dist.irecv, others[number], group=self._group, group_peer=rank))
        for rank in sorted(set(self._holders[tie.name])):
            if rank != self._rank:
                transfers += [
                    dist.P2POp(dist.isend, each, group=self._group, group_peer=rank)
                    for each in local.values()
                ]
        for work in dist.batch_isend_irecv(transfers) if transfers else ():
            work.wait()
        # In the same order on all ranks, so that all copies stay equal to the bit.
        total = functools.reduce(torch.add, (part for _, part in sorted((local | others).items())))
        for number, parameter in copies.items():
            gradient = own[number]
            assert gradient is not None
            _local(gradient).copy_(total)
            parameter.grad = gradient

    def _compare(self, copies: Mapping[str, Mapping[int, nn.Parameter]]) -> None:
        """Refuse copies that are divided in different ways: their parts are not those of the same elements.

        Raises:
            ParamError: on all ranks, if there are such copies.
        """
        own = {name: [_division(each) for each in found.values()] for name, found in copies.items()}
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, own, group=self._group)
        for tie in self._ties:
            found = {each for divisions in everyone for each in divisions.get(tie.name, ())}
            if len(found) > 1:
                raise ParamError(
                    f"{' and '.join(map(repr, tie.names))} are one parameter, and pipeline stages divide it in "
                    f"different ways: {' and '.join(sorted(found))}. Divide an embedding by 'embedding_rowwise' and "
                    "the head with its weights by 'colwise', or neither, and shard all stages or none."
                )


def _tied_parameters(stage: nn.Module) -> list[TiedParameter]:
    """The tied parameters of the model from which a stage was cut; there may be wrappers around the stage."""
    return [tie for each in stage.modules() for tie in getattr(each, "tied_parameters", ())]


def _find_parameter(stage: nn.Module, name: str) -> nn.Parameter:
    inner = next(each for each in stage.modules() if hasattr(each, "tied_parameters"))
    return inner.get_parameter(name)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _division(parameter: nn.Parameter) -> str:
    gradient = "no gradient" if parameter.grad is None else "a gradient"
    return f"{getattr(parameter, 'placements', 'whole')} with {gradient}"


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
    ) -> None:
        kind = SCHEDULES[schedule]
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        num_stages = ranks * kind.stages_per_rank
        _check_microbatches(schedule, ranks, microbatches)
        if kind.splits_backward and any(isinstance(stage, FSDPModule) for stage in stages):
            # With torch 2.13 the gradients are wrong: FSDP2 reduces them before all are computed.
            names = [name for name, other in SCHEDULES.items() if not other.splits_backward]
            raise ParamError(
                f"The schedule {schedule!r} splits the backward pass, which FSDP2 does not support. Use one of "
                f"{', '.join(names)} with sharded stages, or average_gradients() in place of shard() for replicas."
            )
        self._group = group
        self.microbatches = microbatches
        numbers = stages_of_rank(schedule, rank, ranks)
        self._has_first = 0 in numbers
        self._has_last = num_stages - 1 in numbers
        self.rank_of_last = dist.get_global_rank(group, 0 if kind.is_v else ranks - 1)
        device = device or torch.device("cpu")
        wrapped = [
            _Stage(stage, number, num_stages, device, group=group)
            for stage, number in zip(stages, numbers, strict=True)
        ]
        self._wrapped, self._is_tried = wrapped, False
        self._tied = _TiedGradients(stages, schedule, group)
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
            args: inputs of the model, with the rows of the batch first; used on the rank of the first stage.
            target: target of the loss; used on the rank of the last stage.
            kwargs: keyword arguments of every stage, the same on all ranks.

        Returns:
            The loss of the batch, the same on all ranks, without gradients.
        """
        loss = self.run(*args, target=target, **kwargs)
        dist.broadcast(loss, self.rank_of_last, group=self._group)
        return loss

    def run(self, *args: Any, target: Any, **kwargs: Any) -> Tensor:
        """Do the same as :meth:`step` without broadcasting the loss: it is 0 on ranks without the last stage."""
        losses: list[Tensor] | None = [] if self._has_last else None
        refusal = None
        if not self._is_tried:
            trial = _Trial([stage.submod for stage in self._wrapped])
            for stage in self._wrapped:
                stage.on_first_microbatch = trial.undo
            self._is_tried = True
        try:
            with self._tied.summed():
                self._schedule.step(
                    *(args if self._has_first else ()),
                    target=target if self._has_last else None,
                    losses=losses,
                    return_outputs=False,
                    **kwargs,
                )
        except RuntimeError as error:  # torch's wrapping of an error in the backward pass
            if not isinstance(error.__cause__, ParamError):
                raise
            refusal = error.__cause__
        if refusal is not None:
            raise refusal
        return torch.stack(losses).sum().detach().float() if losses else torch.zeros(())


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
    owners = {number: each for each in range(ranks) for number in stages_of_rank(schedule, each, ranks)}
    own = stages_of_rank(schedule, rank, ranks)
    outputs, sent = [], list[Any]()
    parts = [torch.tensor_split(each, microbatches) for each in args]
    named = {name: torch.tensor_split(each, microbatches) for name, each in kwargs.items()}
    for index in range(microbatches):
        given: tuple[Any, ...] = tuple(each[index] for each in parts)
        for number, stage in zip(own, stages, strict=True):
            if number and owners[number - 1] != rank:
                device = next((each.device for each in stage.parameters()), torch.device("cpu"))
                given = (_receive(owners[number - 1], group, device),)
            output = stage(*given, **{name: each[index] for name, each in named.items()})
            if number == len(owners) - 1:
                outputs.append(output)
            elif owners[number + 1] != rank:
                sent += _send(output, owners[number + 1], group)
            given = (output,)
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
    return [(dist.isend(each, group=group, group_dst=to), each) for each in (header, tensor)]


def _receive(source: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    header = torch.zeros(_HEADER, dtype=torch.int64, device=device)
    dist.recv(header, group=group, group_src=source)
    kind, ndim, *shape = header.tolist()
    tensor = torch.empty(shape[:ndim], dtype=_DTYPES[kind], device=device)
    dist.recv(tensor, group=group, group_src=source)
    return tensor
