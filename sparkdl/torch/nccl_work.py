"""What a collective of CUDA tensors over NCCL returns to torch. Runs on the *rank*."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Work

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from sparkdl.collective.nccl_group import NcclGroup, NcclHandle
    from sparkdl.errors import SparkdlError
    from sparkdl.torch.gpu_lane import Lane


class NcclWork(Work):
    """A collective that is on a stream.

    As with torch's own NCCL, waiting has the caller's stream wait, not the host, and a collective that fails on the
    GPU fails the next call; its own results are then worthless.
    """

    def __init__(
        self, outputs: Sequence[torch.Tensor], group: NcclGroup, handle: NcclHandle, lane: Lane, mark: Any
    ) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._group = group
        self._handle = handle
        self._lane = lane
        self._mark = mark
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - c10d's argument; the host never waits
        """Have the current stream wait until the outputs hold the result.

        Raises:
            CommunicatorError: if the group has failed; the subclass says how.
        """
        self._group.check()
        self._lane.join(self._mark)
        return True

    def synchronize(self) -> None:
        """The same as ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """The GPU has done it, or the group has failed."""
        return self.exception() is not None or self._handle.done()

    def is_success(self) -> bool:
        """The GPU has done it."""
        return self.exception() is None and self._handle.done()

    def exception(self) -> SparkdlError | None:
        """What the group has failed with, or None."""
        return self._group.error()

    def result(self) -> list[torch.Tensor]:
        """The output tensors; wait first."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the output tensors, whose waiters' streams wait as in ``wait``."""
        if self._future is None:
            self._future = self._lane.new_future()
            with self._lane.beside(self._outputs, asynchronous=True):
                self._lane.join(self._mark)
                self._future.set_result(self._outputs)
        return self._future
