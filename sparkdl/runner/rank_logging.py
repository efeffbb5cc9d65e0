"""Marks the records of Python's logging and of ``log_to_driver`` on a rank, and provides ``progress()``.

The marks show the driver which lines are records and which were printed. :func:`set_up_logging` runs on a *rank*,
:func:`line_reader` on the *driver*. :func:`progress` runs on a rank, in a function that a Runner runs; from its first
call on, a rank that stops calling it counts as hanging.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sparkdl.collective.current import provided
from sparkdl.errors import ParamError
from sparkdl.launch.lines import AlikeLines
from sparkdl.launch.wire.messages import FOR_DRIVER, mark_lines, split_mark
from sparkdl.topology import name_ranks

if TYPE_CHECKING:
    from sparkdl.launch import RankContext
    from sparkdl.launch.supervision import OnLog


OnLine = Callable[[int, str, "int | None"], None]
"""Called with rank, line, and the level of the log record that it belongs to; None for a printed line."""

_FORMAT = "%(levelname)s %(name)s: %(message)s"


class _MarkingHandler(logging.StreamHandler):  # type: ignore[type-arg]  # generic in stubs alone
    """Writes records to standard error, with their level as a mark."""

    def __init__(self, level: int) -> None:
        super().__init__(sys.stderr)
        self.setLevel(level)
        self.setFormatter(logging.Formatter(_FORMAT))

    def format(self, record: logging.LogRecord) -> str:
        return mark_lines(record.levelno, super().format(record))


def set_up_logging(level: int | None) -> None:
    """Mark log records with their level for the driver.

    Args:
        level: level of the root logger, which then gets our handler. When None, our handler replaces Python's handler
            of last resort, which shows warnings of loggers without handlers, so that ``logging.basicConfig`` works as
            usual.
    """
    if level is None:
        logging.lastResort = _MarkingHandler(logging.WARNING)
    else:
        logging.getLogger().addHandler(_MarkingHandler(logging.NOTSET))
        logging.getLogger().setLevel(level)
    provided.driver_log = lambda message: print(mark_lines(FOR_DRIVER, message), flush=True)


def line_reader(on_line: OnLine | None, *, only_for_driver: bool) -> OnLog:
    """Return a function that takes the lines of ranks, removes their marks and passes them on.

    Args:
        on_line: called with each line; when None, lines are printed with the rank before them, messages for the driver
            to standard output and all others to standard error, and those that ranks print alike once.
        only_for_driver: whether to drop all lines except messages for the driver.
    """

    def is_wanted(mark: str | None) -> bool:
        return mark == FOR_DRIVER or not only_for_driver

    def show(ranks: Sequence[int], line: str) -> None:
        mark, text = split_mark(line)
        if is_wanted(mark):
            stream = sys.stdout if mark == FOR_DRIVER else sys.stderr
            print(f"[{name_ranks(ranks)}] {text}", file=stream, flush=True)

    if on_line is None:
        return AlikeLines(show)

    def pass_on(rank: int, line: str) -> None:
        mark, text = split_mark(line)
        if is_wanted(mark):
            on_line(rank, text, None if mark is None or mark == FOR_DRIVER else int(mark))

    return pass_on


def level_number(level: int | str | None) -> int | None:
    """Return the number of a level of Python's logging, given by name or number; None stays None.

    Raises:
        ParamError: if there is no level of that name.
    """
    if level is None or (isinstance(level, int) and not isinstance(level, bool)):
        return level
    names = {name: number for number, name in logging._levelToName.items()}
    if not isinstance(level, str) or level.upper() not in names:
        raise ParamError(
            f"log_level={level!r} is not a level of logging; it may be one of {', '.join(names)}."
        )
    return names[level.upper()]


contexts: list[RankContext] = []
"""The context of the rank for which :func:`progress` reports, if this process is one; empty otherwise."""


def progress(*, done: bool = False) -> None:
    """Report progress. Costs next to nothing; call it as often as you like.

    From the first call on, a rank that does not call this for the Runner's ``hang_timeout_s``, and waits for no other
    rank meanwhile, counts as hanging. A function that never calls it may compute for as long as no other rank waits for
    it. In a process that is not a rank of a Runner, as when a script runs alone, it does nothing.

    Args:
        done: whether this was the last step; the rest of the function may then take as long as no other rank waits for
            this one.
    """
    for context in contexts:
        context.progress(done=done)
