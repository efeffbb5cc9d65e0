"""Waiting for what becomes true by itself, with a deadline."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from sparkdl.collective import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable


def eventually(claim: Callable[[], bool], *, timeout_s: float = 5.0) -> bool:
    """Whether ``claim`` becomes true in time."""
    deadline = Deadline(timeout_s)
    while not claim():
        if deadline.expired:
            return False
        threading.Event().wait(0.02)
    return True
