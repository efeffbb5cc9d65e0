"""Messages of c10d between two ranks: send and recv, which pipelines use.

Runs on the *rank*. They do not wait in the queue of the collectives: a message goes as soon as its receiver takes
it, whatever else is under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sparkdl.errors import ParamError
from sparkdl.torch.buffers import export, movable, restore
from sparkdl.torch.submission import Submission, recorded
from sparkdl.torch.work import CollectiveWork, FutureCompleter

if TYPE_CHECKING:
    from collections.abc import Sequence


class Messages(Submission):
    """send and recv; torch's ``isend`` and ``irecv`` are these, and its ``send`` and ``recv`` wait for them."""

    _message_completer: FutureCompleter

    @recorded("send")
    def send(self, tensors: Sequence[torch.Tensor], destination: int, tag: int = 0) -> Any:
        """Send a tensor to a rank of the group; returns at once."""
        (tensor,) = tensors
        if (other := self._group_of(tensor)) is not None:
            return other.send(tensors, destination, tag)
        handle = self._communicator.send_async(
            export(movable(tensor)), to=destination, tag=tag, timeout_s=self._timeout_s
        )
        return CollectiveWork((), (handle,), self._message_completer)

    @recorded("recv")
    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int = 0) -> Any:
        """Receive into a tensor what a rank of the group sends with this tag; returns at once."""
        (tensor,) = tensors
        if (other := self._group_of(tensor)) is not None:
            return other.recv(tensors, source, tag)
        return self._recv(tensors, source, tag)

    @recorded("recvAnySource")
    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Any:
        """Receive into a tensor what any rank of the group sends with this tag; returns at once.

        The work's ``_source_rank()`` is the sender once it is complete.
        """
        (tensor,) = tensors
        if self._group_of(tensor) is not None:
            raise ParamError(
                f"recv from any rank is for CPU tensors, got one on {tensor.device}: name the rank, as recv(src=...)."
            )
        return self._recv(tensors, None, tag)

    def _recv(self, tensors: Sequence[torch.Tensor], source: int | None, tag: int) -> CollectiveWork:
        (tensor,) = tensors
        buffer = movable(tensor)
        handle = self._communicator.recv_async(
            export(buffer), source=source, tag=tag, timeout_s=self._timeout_s
        )
        return CollectiveWork(
            tensors,
            (handle,),
            self._message_completer,
            (lambda: restore(buffer, tensor),),
            sender=lambda: handle.source,
        )
