"""Marks the records of Python's logging and of ``log_to_driver`` on a rank, and provides ``progress()``.

The marks tell the driver which lines are records and which were printed. :func:`set_up_logging` runs on a *rank*,
:class:`LineReader` on the *driver*. :func:`progress` runs on a rank, in a function that a Runner runs; from its first
call on, a rank that stops calling it counts as hanging.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from sparkdl.errors import ParamError
from sparkdl.horovod import provide_driver_log
from sparkdl.launch.wire.messages import FOR_DRIVER, mark_lines, split_mark

if TYPE_CHECKING:
    from sparkdl.launch import RankContext


OnLine = Callable[[int, str, "int | None"], None]
"""Gets rank, line, and the level of the log record that the line is of; None if the line was printed."""

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
    """Have log records say their level to the driver.

    Args:
        level: of the root logger, which gets a handler; when None, only what nobody has configured logging for goes
            through ours, from warnings on, as Python has it, and ``logging.basicConfig`` works as ever.
    """
    if level is None:
        logging.lastResort = _MarkingHandler(logging.WARNING)
    else:
        logging.getLogger().addHandler(_MarkingHandler(logging.NOTSET))
        logging.getLogger().setLevel(level)
    provide_driver_log(lambda message: print(mark_lines(FOR_DRIVER, message), flush=True))


class LineReader:
    """Takes the marks off lines and hands them on.

    Args:
        on_line: gets them; when None, they are printed with the rank before them, messages for the driver to standard
            output and everything else to standard error.
        only_for_driver: drop what is no message for the driver.
    """

    def __init__(self, on_line: OnLine | None, only_for_driver: bool) -> None:
        self._on_line, self._only_for_driver = on_line, only_for_driver

    def __call__(self, rank: int, line: str) -> None:
        """Take one line of a rank."""
        mark, text = split_mark(line)
        if self._only_for_driver and mark != FOR_DRIVER:
            return
        if self._on_line is not None:
            self._on_line(rank, text, None if mark is None or mark == FOR_DRIVER else int(mark))
        else:
            show = partial(print, file=sys.stdout if mark == FOR_DRIVER else sys.stderr, flush=True)
            show(f"[rank {rank}] {text}")


def level_number(level: int | str | None) -> int | None:
    """Return a level of Python's logging as its number.

    Raises:
        ParamError: if there is none of that name.
    """
    if level is None or (isinstance(level, int) and not isinstance(level, bool)):
        return level
    names = {name: number for number, name in logging._levelToName.items()}
    if not isinstance(level, str) or level.upper() not in names:
        raise ParamError(f"log_level={level!r} is no level of logging; it may be one of {', '.join(names)}.")
    return names[level.upper()]


_contexts: list[RankContext] = []
"""That of the rank which this process is; none in any other process."""


def provide_progress(context: RankContext) -> None:
    """Have :func:`progress` speak for this rank."""
    _contexts[:] = [context]


def progress(*, done: bool = False) -> None:
    """Say that the function has come a step further; call it as often as you like, it costs next to nothing.

    From the first call on, a rank that does not call this for the Runner's ``hang_timeout_s``, and waits for no other
    rank meanwhile, counts as hanging. A function that never calls it may compute as long as it keeps nobody waiting.
    In a process that is no rank of a Runner, as where a script is tried alone, it does nothing.

    Args:
        done: that was the last step, and what follows may take as long as it keeps nobody waiting.
    """
    for context in _contexts:
        context.progress(done=done)
