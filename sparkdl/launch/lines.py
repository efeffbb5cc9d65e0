"""The lines that ranks print, joined where several ranks print the same one."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

JOIN_WITHIN_S = 0.5
"""How long a line is held back for the other ranks that may print it, too."""


@dataclass
class _Held:
    line: str
    number: int
    ranks: set[int] = field(default_factory=set)
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
        self._held: deque[_Held] = deque()
        self._alike: dict[str, list[_Held]] = {}
        """The held lines by their text, so that a line costs the same however many are held."""
        self._last: dict[int, int] = {}
        """Number of the last line of each rank."""
        self._numbers = itertools.count()
        self.num_ranks = 0

    def __call__(self, rank: int, line: str) -> None:
        """Take a line of a rank."""
        alike = self._alike.setdefault(line, [])
        # A line joins only what comes after the last line of its rank.
        index = bisect_right(alike, self._last.get(rank, -1), key=lambda held: held.number)
        if index == len(alike):
            alike.append(_Held(line, next(self._numbers)))
            self._held.append(alike[index])
        alike[index].ranks.add(rank)
        self._last[rank] = alike[index].number
        self.show_due()

    def show_due(self, *, is_end: bool = False) -> None:
        """Show the lines that all ranks have printed or that were held back long enough; at the end, all lines."""
        due = time.monotonic() - JOIN_WITHIN_S
        while self._held and (
            is_end or len(self._held[0].ranks) >= self.num_ranks > 0 or self._held[0].since <= due
        ):
            held = self._held.popleft()
            alike = self._alike[held.line]
            alike.pop(0)
            if not alike:
                del self._alike[held.line]
            self._show(sorted(held.ranks), held.line)
