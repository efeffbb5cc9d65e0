"""Whether processes still run, for tests that end them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: Sequence[int], timeout_s: float) -> list[int]:
    """Wait for the end of processes and return those that still run."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        pause.wait(0.05)
    return left
