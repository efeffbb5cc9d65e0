"""The collectives of c10d in which ranks get different data, unread: gather, scatter and alltoall.

Runs on the *rank*. Distributed checkpoints use gather and scatter, DTensor uses alltoall. Method names, arguments
and return values are c10d's, under both names where torch renamed one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import AllToAllOptions, GatherOptions, ScatterOptions

from sparkdl.errors import ParamError
from sparkdl.torch.buffers import elements_per_element, movable
from sparkdl.torch.movements import restoring_parts
from sparkdl.torch.submission import Finish, Submission, recorded, restoring

if TYPE_CHECKING:
    from collections.abc import Sequence


class Exchanges(Submission):
    """gather, scatter and alltoall in its forms."""

    @recorded("gather", 1)
    def gather(
        self, output_lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Copy the input of every rank to the root's list of tensors, of one size."""
        tensor = inputs[0]
        if (other := self._group_of(tensor)) is not None:
            return other.gather(output_lists, inputs, opts)
        opts = GatherOptions() if opts is None else opts
        source = movable(tensor)
        if self._communicator.rank != opts.rootRank:
            return self._work((), self._call("gather", opts, source, None, root=opts.rootRank))
        outputs = list(output_lists[0])
        self._check_alike("gather", tensor, outputs)
        target = source.new_empty(source.numel() * self._communicator.world_size)
        handles = self._call("gather", opts, source, target, root=opts.rootRank)
        return self._work(outputs, handles, restoring_parts(target, outputs))

    @recorded("scatter", 1)
    def scatter(
        self, outputs: Sequence[torch.Tensor], input_lists: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> Any:
        """Give every rank its entry of the root's list of tensors, of one size."""
        output = outputs[0]
        if (other := self._group_of(output)) is not None:
            return other.scatter(outputs, input_lists, opts)
        opts = ScatterOptions() if opts is None else opts
        target = movable(output)
        source = None
        if self._communicator.rank == opts.rootRank:
            self._check_alike("scatter", output, input_lists[0])
            source = torch.cat([movable(tensor) for tensor in input_lists[0]])
        handles = self._call("scatter", opts, source, target, root=opts.rootRank)
        return self._work(outputs, handles, [restoring(target, output)])

    @recorded("all_to_all", 1)
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Any:
        """Send block r of a tensor to rank r; sizes count rows, and are equal where none are given."""
        if (other := self._group_of(tensor)) is not None:
            return other.alltoall_base(output, tensor, output_split_sizes, input_split_sizes, opts)
        world_size = self._communicator.world_size
        target = movable(output)
        finishes: list[Finish] = [restoring(target, output)]
        handles = self._call(
            "alltoall",
            AllToAllOptions() if opts is None else opts,
            movable(tensor),
            target,
            send_counts=_elements_per_rank(tensor, input_split_sizes, world_size),
            receive_counts=_elements_per_rank(output, output_split_sizes, world_size),
        )
        return self._work([output], handles, finishes)

    alltoall_base = all_to_all_single

    @recorded("all_to_all", 1)
    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Send ``inputs[r]`` to rank r and receive ``outputs[r]`` from it."""
        if (other := self._group_of(inputs[0])) is not None:
            return other.alltoall(outputs, inputs, opts)
        sources = [movable(tensor) for tensor in inputs]
        received = [output.numel() * elements_per_element(output) for output in outputs]
        target = sources[0].new_empty(sum(received))
        handles = self._call(
            "alltoall",
            AllToAllOptions() if opts is None else opts,
            torch.cat(sources),
            target,
            send_counts=[source.numel() for source in sources],
            receive_counts=received,
        )
        return self._work(outputs, handles, restoring_parts(target, outputs))

    def _check_alike(self, name: str, tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
        sizes = [other.numel() for other in others]
        if sizes != [tensor.numel()] * self._communicator.world_size:
            raise ParamError(
                f"{name} of {tensor.numel()} elements per rank over {self._communicator.world_size} ranks does "
                f"not fit the root's tensors of {sizes} elements."
            )


def _elements_per_rank(tensor: torch.Tensor, split_sizes: Sequence[int] | None, world_size: int) -> list[int]:
    """Elements, as they travel, of each rank's block of a tensor that is split by rows."""
    num_rows = tensor.shape[0]
    if not split_sizes:
        if num_rows % world_size:
            raise ParamError(f"alltoall cannot divide {num_rows} rows evenly among {world_size} ranks.")
        split_sizes = [num_rows // world_size] * world_size
    if len(split_sizes) != world_size or sum(split_sizes) != num_rows:
        raise ParamError(
            f"alltoall split sizes {list(split_sizes)} do not divide {num_rows} rows among {world_size} ranks."
        )
    per_row = tensor.numel() // max(1, num_rows) * elements_per_element(tensor)
    return [size * per_row for size in split_sizes]
