"""Has SIGTERM end a job as Ctrl-C does, and the end of spark-submit as well. Runs on the *driver*."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from sparkdl.jobs.exit_codes import Terminated

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@contextmanager
def ends_when_asked() -> Iterator[None]:
    """Raise :class:`Terminated` in the main thread when SIGTERM comes; another one does not disturb the ending."""
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_with_parent() -> None:
    """Have this process get SIGTERM when its parent ends, however that comes about.

    spark-submit leaves its Python program alone when it is killed itself.
    """
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signal.SIGTERM)


def _raise(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated("SIGTERM")
