"""Waiting, with a deadline, for a condition that becomes true without further action."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from sparkdl.collective import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable


def eventually(claim: Callable[[], bool], *, timeout_s: float = 5.0) -> bool:
    """Whether ``claim`` becomes true within ``timeout_s``."""
    deadline = Deadline(timeout_s)
    while not claim():
        if deadline.expired:
            return False
        threading.Event().wait(0.02)
    return True
