"""What the two ends of a message link say to each other. Nothing here communicates."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sparkdl.collective.pending_message import PendingMessage

Words = np.ndarray[Any, np.dtype[np.int64]]


class FrameKind(IntEnum):
    """See :mod:`sparkdl.collective.message_link`."""

    OFFER = 0
    ACCEPT = 1
    DATA = 2
    BYE = 3


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One thing that is said.

    Attributes:
        kind: what it is.
        number: of the message, by its sender.
        tag: of the message.
        envelope: number of the dtype and elements, as the end that speaks has them.
        message: the end here that it is about; does not travel.
    """

    kind: FrameKind
    number: int = 0
    tag: int = 0
    envelope: tuple[int, int] = (0, 0)
    message: PendingMessage | None = None

    def to_array(self) -> Words:
        """Five int64."""
        return np.array([self.kind, self.number, self.tag, *self.envelope], np.int64)

    @classmethod
    def from_array(cls, words: Words) -> Frame:
        """Decode what :meth:`to_array` made."""
        kind, number, tag, dtype, count = words.tolist()
        return cls(kind=FrameKind(kind), number=number, tag=tag, envelope=(dtype, count))


def new_frame() -> Words:
    """Memory for a frame to arrive in."""
    return np.empty(5, np.int64)
