"""The collectives of c10d that a communicator does not have, made of those that it has.

Runs on the *rank*. Distributed checkpoints use gather and scatter, DTensor uses alltoall. Each is right and
has the communicator's deadlines and errors; what it costs is said with it.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._C._distributed_c10d import (
    AllToAllOptions,
    GatherOptions,
    ReduceOptions,
    ScatterOptions,
)

from sparkdl.errors import ParamError
from sparkdl.torch.buffers import as_bytes, flatten
from sparkdl.torch.movements import Movements
from sparkdl.torch.reductions import Reductions
from sparkdl.torch.submission import Finish, copying

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective import Handle


class ComposedCollectives(Reductions, Movements):
    """reduce, gather, scatter and alltoall, and the refusal of send and recv."""

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Reduce over the ranks into the root's tensors; the others keep theirs. Costs an allreduce."""
        tensors = list(tensors)
        if (other := self._group_of(tensors[0])) is not None:
            return other.reduce(tensors, opts)
        opts = ReduceOptions() if opts is None else opts
        copies = [flatten(tensor).clone() for tensor in tensors]
        handles: list[Handle] = []
        finishes: list[Finish] = []
        for copy in copies:
            self._allreduce_one(copy, opts, handles, finishes)
        if self._communicator.rank == opts.rootRank:
            finishes.append(copying(tensors, [c.view(t.shape) for c, t in zip(copies, tensors, strict=True)]))
        return self._work(tensors, handles, finishes)

    def gather(
        self, output_lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Copy the input of every rank to the root's list of tensors, of one size. Costs an allgather."""
        tensor = inputs[0]
        if (other := self._group_of(tensor)) is not None:
            return other.gather(output_lists, inputs, opts)
        opts = GatherOptions() if opts is None else opts
        handles: list[Handle] = []
        finishes: list[Finish] = []
        outputs = list(output_lists[0]) if self._communicator.rank == opts.rootRank else []
        if tensor.numel() > 0:
            rows = self._gather_rows(tensor, tensor.numel(), opts, handles)
            if outputs:
                parts = [row.view(output.shape) for row, output in zip(rows, outputs, strict=True)]
                finishes.append(copying(outputs, parts))
        return self._work(outputs, handles, finishes)

    def scatter(
        self, outputs: Sequence[torch.Tensor], input_lists: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> Any:
        """Give every rank its entry of the root's list of tensors, of one size. Costs a broadcast of it."""
        output = outputs[0]
        if (other := self._group_of(output)) is not None:
            return other.scatter(outputs, input_lists, opts)
        opts = ScatterOptions() if opts is None else opts
        rank, world_size = self._communicator.rank, self._communicator.world_size
        handles: list[Handle] = []
        finishes: list[Finish] = []
        if output.numel() > 0:
            rows = torch.empty((world_size, output.numel()), dtype=output.dtype)
            if rank == opts.rootRank:
                for row, tensor in zip(rows, input_lists[0], strict=True):
                    row.copy_(flatten(tensor))
            handles += self._call("broadcast", opts, as_bytes(rows), root=opts.rootRank)
            finishes.append(copying([output], [rows[rank].view(output.shape)]))
        return self._work(outputs, handles, finishes)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Any:
        """Send block r of a tensor to rank r; sizes count rows, and are equal where none are given.

        Costs an allgather of the inputs, padded to the largest: ``world_size`` times what a direct exchange
        moves.
        """
        if (other := self._group_of(tensor)) is not None:
            return other.alltoall_base(output, tensor, output_split_sizes, input_split_sizes, opts)
        sent = _elements_per_rank(tensor, input_split_sizes, self._communicator.world_size)
        received = _elements_per_rank(output, output_split_sizes, self._communicator.world_size)
        target = torch.empty(output.numel(), dtype=output.dtype)
        even = not input_split_sizes and not output_split_sizes
        return self._exchange(
            [output],
            target=target,
            source=flatten(tensor),
            sent=sent,
            received=received,
            even=even,
            opts=opts,
        )

    alltoall_base = all_to_all_single

    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Send ``inputs[r]`` to rank r and receive ``outputs[r]`` from it, at the cost of the above."""
        if (other := self._group_of(inputs[0])) is not None:
            return other.alltoall(outputs, inputs, opts)
        received = [output.numel() for output in outputs]
        target = torch.empty(sum(received), dtype=outputs[0].dtype)
        source = torch.cat([flatten(tensor) for tensor in inputs])
        sent = [tensor.numel() for tensor in inputs]
        return self._exchange(
            outputs, target=target, source=source, sent=sent, received=received, even=False, opts=opts
        )

    def _exchange(
        self,
        outputs: Sequence[torch.Tensor],
        *,
        target: torch.Tensor,
        source: torch.Tensor,
        sent: list[int],
        received: list[int],
        even: bool,
        opts: Any,
    ) -> Any:
        """Exchange flat blocks of ``sent[r]`` elements; ``target`` takes them flat for ``outputs``."""
        opts = AllToAllOptions() if opts is None else opts
        rank, world_size = self._communicator.rank, self._communicator.world_size
        sizes = [sent] * world_size if even else self._all_sizes(sent, opts)
        if [row[rank] for row in sizes] != received:
            raise ParamError(
                f"alltoall: rank {rank} expects {received} elements from the ranks, "
                f"which send {[row[rank] for row in sizes]}."
            )
        handles: list[Handle] = []
        width = max(sum(row) for row in sizes)
        if width > 0:
            rows = self._gather_rows(source, width, opts, handles)

        def finish() -> None:
            if target.numel() > 0:
                starts = [sum(row[:rank]) for row in sizes]
                torch.cat(
                    [
                        rows[r, start : start + count]
                        for r, (start, count) in enumerate(zip(starts, received, strict=True))
                    ],
                    out=target,
                )
            ends = list(accumulate(output.numel() for output in outputs))
            for output, end in zip(outputs, ends, strict=True):
                output.detach().copy_(target[end - output.numel() : end].view(output.shape))

        return self._work(outputs, handles, [finish])

    def _all_sizes(self, sent: list[int], opts: Any) -> list[list[int]]:
        mine = torch.tensor(sent, dtype=torch.int64)
        handles: list[Handle] = []
        rows = self._gather_rows(mine, len(sent), opts, handles)
        for handle in handles:
            handle.wait()
        return [[int(size) for size in row] for row in rows]

    def send(self, *_: Any) -> NoReturn:
        """Not available.

        Raises:
            NotImplementedError: always.
        """
        self._refuse("send")

    def recv(self, *_: Any) -> NoReturn:
        """Not available.

        Raises:
            NotImplementedError: always.
        """
        self._refuse("recv")

    def recv_anysource(self, *_: Any) -> NoReturn:
        """Not available.

        Raises:
            NotImplementedError: always.
        """
        self._refuse("recv_anysource")

    def _refuse(self, name: str) -> NoReturn:
        raise NotImplementedError(
            f"The c10d backend 'sparkdl' has no {name}: ranks exchange tensors by collectives alone. "
            f"Use broadcast, scatter or all_to_all_single, or a group of another backend."
        )


def _elements_per_rank(tensor: torch.Tensor, split_sizes: Sequence[int] | None, world_size: int) -> list[int]:
    if not split_sizes:
        if tensor.shape[0] % world_size:
            raise ParamError(
                f"alltoall cannot divide {tensor.shape[0]} rows evenly among {world_size} ranks."
            )
        return [tensor.numel() // world_size] * world_size
    if len(split_sizes) != world_size or sum(split_sizes) != tensor.shape[0]:
        raise ParamError(
            f"alltoall split sizes {list(split_sizes)} do not divide {tensor.shape[0]} rows among "
            f"{world_size} ranks."
        )
    elements_per_row = tensor[0].numel() if tensor.shape[0] else 0
    return [size * elements_per_row for size in split_sizes]
