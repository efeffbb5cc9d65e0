"""What Python's logging and ``log_to_driver`` say on a rank, marked so that the driver knows it from printed lines.

:func:`set_up_logging` runs on a *rank*, :class:`LineReader` on the *driver*.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial

from sparkdl.errors import ParamError
from sparkdl.horovod import provide_driver_log
from sparkdl.launch.wire.messages import FOR_DRIVER, mark_lines, split_mark

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
