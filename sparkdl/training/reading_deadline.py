"""How long a rank waits for a row group in a fit. Runs on a *rank*."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkdl.collective import Communicator

_MOST_S = 600.0


def read_timeout_s(communicator: Communicator) -> float:
    """Return the seconds to wait for a row group: half of those that the others wait for this rank, at most 600.

    While a rank reads, the others wait for it in a collective. It has to give up before they do, as it alone can say
    which file it waits for.
    """
    return min(_MOST_S, communicator.timeout_s / 2)
