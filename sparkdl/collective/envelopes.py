"""What the two ends of a message say of it, so that they find out whether they mean the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.collective.flat_buffers import DTYPES
from sparkdl.errors import MismatchError, ParamError

if TYPE_CHECKING:
    from sparkdl.collective.flat_buffers import FlatBuffer
    from sparkdl.collective.mpi_device import DeviceBuffer

Envelope = np.ndarray[Any, np.dtype[np.int64]]
"""Two numbers: the dtype's place in :data:`DTYPES`, and the elements."""


def envelope_of(buffer: FlatBuffer | DeviceBuffer) -> Envelope:
    """What is sent, or what there is room for."""
    return np.array([DTYPES.index(buffer.dtype), buffer.data.size], np.int64)


def check_peer(peer: int, rank: int, world_size: int) -> None:
    """Check that a rank can exchange messages with another.

    Raises:
        ParamError: if there is no such rank, or it is this one.
    """
    if not 0 <= peer < world_size or peer == rank:
        raise ParamError(f"rank {rank} of {world_size} cannot exchange messages with rank {peer}")


def compare(sent: Envelope, expected: Envelope, *, source: int, to: int, tag: int) -> None:
    """Compare what both ends of a message say.

    Raises:
        MismatchError: if they disagree; the same on both.
    """
    if sent.tolist() != expected.tolist():
        raise MismatchError(
            f"the ranks disagree about a message with tag {tag}: rank {source} said send of {_describe(sent)}"
            f" to rank {to}; rank {to} said recv of {_describe(expected)} from rank {source}"
        )


def _describe(envelope: Envelope) -> str:
    dtype, count = envelope.tolist()
    return f"{count} {DTYPES[dtype]}"
