"""Parameters that several stages of a pipeline have, such as the weights that an embedding and a head share."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from sparkdl.parallel.pipeline.schedules import ranks_of_stages, stages_of_rank
from sparkdl.parallel.verify.copies import check_tied
from sparkdl.torch.averaging import device_of_counts
from sparkdl.torch.buffers import local_part

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sparkdl.parallel.verify.verification import Verification


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


class TiedGradients:
    """Sums the gradients of parameters that several stages have, so that all copies of one stay equal.

    Args:
        stages: stages of this rank, in ascending order.
        schedule: name of the schedule for which they were cut.
        group: process group of the ranks of the pipeline.
        verification: the steps in which the copies are compared.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        schedule: str,
        group: dist.ProcessGroup,
        verification: Verification,
    ) -> None:
        self._stages, self._group, self._verification = stages, group, verification
        self._rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._numbers = stages_of_rank(schedule, self._rank, ranks)
        owners = ranks_of_stages(schedule, ranks)
        # There may be wrappers around the stages.
        self._ties: list[TiedParameter] = [
            tie for module in stages[0].modules() for tie in getattr(module, "tied_parameters", ())
        ]
        self._is_division_checked = False
        self._holders = {tie.name: [owners[number] for number in tie.stages] for tie in self._ties}

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Context whose backward passes add to each copy the gradients of all copies. Collective."""
        if not self._ties:
            yield
            return
        copies = {tie.name: self._copies(tie) for tie in self._ties}
        earlier = [(parameter, parameter.grad) for of_tie in copies.values() for parameter in of_tie.values()]
        for parameter, _ in earlier:
            parameter.grad = None
        yield
        # Divisions also without verification, as the gradients of other elements would be added.
        divisions, values = not self._is_division_checked, self._verification.is_due
        if divisions or values:
            check_tied(self._ties, copies, self._group, divisions=divisions, values=values)
            self._is_division_checked = True
        for tie in self._with_gradients(copies):
            self._sum(tie, copies[tie.name])
        for parameter, gradient in earlier:
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad

    def _copies(self, tie: TiedParameter) -> dict[int, nn.Parameter]:
        """This rank's copies of a parameter that is trained, by the number of the stage."""
        copies = {
            number: next(
                module for module in stage.modules() if hasattr(module, "tied_parameters")
            ).get_parameter(tie.name)
            for number, stage in zip(self._numbers, self._stages, strict=True)
            if number in tie.stages
        }
        return {number: parameter for number, parameter in copies.items() if parameter.requires_grad}

    def _with_gradients(self, copies: Mapping[str, Mapping[int, nn.Parameter]]) -> list[TiedParameter]:
        """The parameters that have a gradient in any stage; FSDP2 has none while it accumulates them."""
        counts = torch.tensor(
            [
                any(parameter.grad is not None for parameter in copies[tie.name].values())
                for tie in self._ties
            ],
            dtype=torch.uint8,
            device=device_of_counts(next(self._stages[0].parameters()).device, self._group),
        )
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=self._group)
        return [tie for tie, has_gradient in zip(self._ties, counts.tolist(), strict=True) if has_gradient]

    def _sum(self, tie: TiedParameter, copies: Mapping[int, nn.Parameter]) -> None:
        if not copies:
            return
        gradients = {
            number: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for number, parameter in copies.items()
        }
        local = {number: local_part(grad).contiguous() for number, grad in gradients.items()}
        like = next(iter(local.values()))
        others, transfers = {}, []
        for number, rank in zip(tie.stages, self._holders[tie.name], strict=True):
            if rank != self._rank:
                others[number] = torch.empty_like(like)
                transfers.append(dist.P2POp(dist.irecv, others[number], group=self._group, group_peer=rank))
        for rank in sorted({*self._holders[tie.name]} - {self._rank}):
            transfers += [
                dist.P2POp(dist.isend, gradient, group=self._group, group_peer=rank)
                for gradient in local.values()
            ]
        for work in dist.batch_isend_irecv(transfers) if transfers else ():
            work.wait()
        # In the same order on all ranks, so that all copies stay equal to the bit.
        total = functools.reduce(torch.add, (part for _, part in sorted((local | others).items())))
        for number, parameter in copies.items():
            local_part(gradients[number]).copy_(total)
            parameter.grad = gradients[number]
