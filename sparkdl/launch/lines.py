"""The lines that ranks print, joined where several ranks print the same one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

JOIN_WITHIN_S = 0.5
"""How long a line is held back for the other ranks that may print it, too."""


@dataclass
class _Held:
    line: str
    ranks: set[int]
    since: float = field(default_factory=time.monotonic)


class AlikeLines:
    """Shows a line once that several ranks print within half a second, as most warnings are.

    The lines of a rank stay in their order. :meth:`show_due` has to be called at short intervals, as
    :class:`~sparkdl.launch.supervision.Supervision` does.

    Args:
        show: called with the ranks that have printed a line, in ascending order, and the line.

    Attributes:
        num_ranks: number of ranks that may print; a line that all of them have printed is not held back any longer.
    """

    def __init__(self, show: Callable[[Sequence[int], str], None]) -> None:
        self._show = show
        self._held: list[_Held] = []
        self.num_ranks = 0

    def __call__(self, rank: int, line: str) -> None:
        """Take a line of a rank."""
        # A line joins only what comes after the last line of its rank.
        last = max((index for index, held in enumerate(self._held) if rank in held.ranks), default=-1)
        for held in self._held[last + 1 :]:
            if held.line == line:
                held.ranks.add(rank)
                break
        else:
            self._held.append(_Held(line, {rank}))
        self.show_due()

    def show_due(self, *, is_end: bool = False) -> None:
        """Show the lines that all ranks have printed or that were held back long enough; at the end, all lines."""
        due = time.monotonic() - JOIN_WITHIN_S
        while self._held and (
            is_end or len(self._held[0].ranks) >= self.num_ranks > 0 or self._held[0].since <= due
        ):
            held = self._held.pop(0)
            self._show(sorted(held.ranks), held.line)
