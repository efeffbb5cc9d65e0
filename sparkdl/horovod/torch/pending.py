"""Operations under way: Horovod's handles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sparkdl.collective import Handle


class Pending:
    """An operation under way, and the tensor that it will have given."""

    def __init__(
        self,
        output: torch.Tensor,
        handles: Sequence[Handle],
        finish: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        self._output = output
        self._handles = list(handles)
        self._finish = finish

    def done(self) -> bool:
        """The operation is complete, or has failed."""
        return all(handle.done() for handle in self._handles)

    def wait(self) -> torch.Tensor:
        """Wait for completion and return the output.

        Raises:
            CommunicatorError: if the operation failed; the subclass says how.
        """
        for handle in self._handles:
            handle.wait()
        self._handles.clear()
        if self._finish is not None:
            self._output = self._finish()
            self._finish = None
        return self._output


def poll(handle: Pending) -> bool:
    """The operation of this handle is complete: ``synchronize`` would return at once."""
    return handle.done()


def synchronize(handle: Pending) -> torch.Tensor:
    """Wait for the operation of this handle and return its output.

    Raises:
        CommunicatorError: if the operation failed; the subclass says how.
    """
    return handle.wait()
