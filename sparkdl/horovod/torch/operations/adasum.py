"""Adasum: a sum of gradients that counts their common part once, and the check whether it can be used.

Two gradients a and b become ``(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``: their sum if they are orthogonal, their
average if they are parallel. The gradients of ranks 0 and 1 are combined, those of 2 and 3, ..., then the results in
the same way (Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import torch

from sparkdl.collective import Communicator
from sparkdl.horovod.torch.current_session import session
from sparkdl.horovod.torch.engine.request import Kind
from sparkdl.horovod.torch.operations.preparation import (
    ReductionRequest,
    as_buffer,
    check_tensors,
    copy_back,
    split_rows,
)
from sparkdl.horovod.torch.process_sets import ProcessSet, global_process_set
from sparkdl.torch.buffers import FLOAT_DTYPES, export

# Nothing is divided by a squared norm below this; Horovod's bound.
_LEAST_SQUARED_NORM = math.sqrt(sys.float_info.min)


class AdasumRequest(ReductionRequest):
    """Combines each tensor over the ranks into an output of the same shape, which may be the same tensor.

    Every rank combines one slice of all ranks' tensors; only the scalar products are summed over all ranks. Ranks that
    have joined cannot combine a slice: if there are any, every other rank combines whole tensors, with zeros for the
    ranks that have joined.
    """

    kind = Kind.ADASUM

    def complete(self, communicator: Communicator) -> None:
        """Combine the tensors."""
        self._stream_point.wait()
        combine = self._combine_slices if self._given.all() else self._combine_whole
        for tensor, output in zip(self._tensors, self._outputs, strict=True):
            if tensor.numel():
                buffer = as_buffer(output)
                combine(communicator, tensor, buffer)
                copy_back(buffer, output)

    def _combine_slices(self, communicator: Communicator, tensor: torch.Tensor, output: torch.Tensor) -> None:
        counts = split_rows(tensor.numel(), communicator.world_size)
        count = counts[communicator.rank]
        received = torch.empty((communicator.world_size, count), dtype=tensor.dtype, device="cpu")
        communicator.alltoall(
            export(as_buffer(tensor)),
            export(received),
            send_counts=counts,
            receive_counts=[count] * communicator.world_size,
            name=self.label,
        )
        combined = self._combine(
            received, lambda products: communicator.allreduce(products.numpy(), name=self.label)
        )
        communicator.allgather(export(combined), export(output), counts=counts, name=self.label)

    def _combine_whole(self, communicator: Communicator, tensor: torch.Tensor, output: torch.Tensor) -> None:
        received = torch.empty((communicator.world_size, tensor.numel()), dtype=tensor.dtype, device="cpu")
        communicator.allgather(export(as_buffer(tensor)), export(received), name=self.label)
        output.copy_(self._combine(received, lambda _: None).view(output.shape))

    def _combine(self, received: torch.Tensor, add_up: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Combine the rows, one per rank; ``add_up`` sums the products of slices to those of whole tensors."""
        wide = torch.float64 if received.dtype == torch.float64 else torch.float32
        rows = list(received.to(wide).mul_(self.description.prescale))
        while len(rows) > 1:
            pairs = list(zip(rows[::2], rows[1::2], strict=True))
            wider = ((a.double(), b.double()) for a, b in pairs)
            products = torch.tensor(
                [(float(a @ b), float(a @ a), float(b @ b)) for a, b in wider],
                dtype=torch.float64,
                device="cpu",
            )
            add_up(products)
            rows = [
                a * _weight(dot, a_squared) + b * _weight(dot, b_squared)
                for (a, b), (dot, a_squared, b_squared) in zip(pairs, products.tolist(), strict=True)
            ]
        combined: torch.Tensor = rows[0].mul_(self.description.postscale)
        return combined.to(received.dtype)


def _weight(dot: float, squared_norm: float) -> float:
    return 1.0 - 0.5 * dot / squared_norm if squared_norm >= _LEAST_SQUARED_NORM else 1.0


def check_adasum(tensors: Sequence[torch.Tensor], process_set: ProcessSet) -> None:
    """Check that tensors can be combined by Adasum.

    Raises:
        NotImplementedError: if not all ranks take part, or their number is not a power of 2.
        ValueError: if a tensor is not of a floating-point dtype.
    """
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if session().world.world_size.bit_count() != 1:
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
    check_tensors(tensors, FLOAT_DTYPES)
