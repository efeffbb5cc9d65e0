"""Commits that outlive the process: how a launcher that starts lost ranks again has them kept. Runs on the *rank*.

Without such a launcher commits stay in memory, and end with the ranks.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class CommitKeeper(Protocol):
    """Keeps the last commit of every state of rank 0, where the ranks that come after find it."""

    def keep(self, state: int, contents: dict[str, dict[str, Any]]) -> None:
        """Keep what a state holds in the place of what was kept before; it is kept whole or not at all.

        Args:
            state: how many states this process had made before it.
            contents: ``parts``, which have a ``state_dict``, and ``objects``, both by name.
        """

    def last(self, state: int) -> dict[str, dict[str, Any]] | None:
        """Return what was kept last; None if nothing was."""


_keepers: list[CommitKeeper] = []


def provide_commit_keeper(keeper: CommitKeeper) -> None:
    """Have the commits of this process kept; for whoever starts the ranks."""
    _keepers[:] = [keeper]


def keep_commit(state: Any) -> None:
    """Have rank 0's last commit kept, if somebody keeps commits."""
    if not _keepers or state._rank() != 0:
        return
    contents = state._committed()
    if contents is None:
        logger.warning(
            "The commits of a %s are lost with the ranks: only those of an ObjectState or TorchState outlive them.",
            type(state).__name__,
        )
        return
    _keepers[0].keep(state._number, contents)


def take_up_commit(state: Any) -> bool:
    """Set rank 0's state to what was kept last, if anything was, and say whether."""
    if not _keepers or state._rank() != 0:
        return False
    contents = _keepers[0].last(state._number)
    if contents is not None:
        state._set_committed(contents)
    return contents is not None
