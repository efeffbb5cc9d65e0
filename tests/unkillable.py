"""Processes whose end after SIGKILL nobody sees, as that of one that waits in the kernel for a disk."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

HOLD = """
import ctypes, sys, time
PTRACE_SEIZE = 0x4206
arguments = [ctypes.c_long(PTRACE_SEIZE), ctypes.c_long(int(sys.argv[1])), None, None]
print(ctypes.CDLL(None).ptrace(*arguments), flush=True)
time.sleep(float(sys.argv[2]))
"""
"""Traces a process: until it ends itself, the parent of that does not hear of the end."""


@contextmanager
def unseen_end(pid: int) -> Iterator[None]:
    """Have the end of a child of this process not be seen, for at most 20 s."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(pid), "20"], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            if holder.stdout.readline() != b"0\n":
                pytest.skip("this machine does not let a process be traced")
            yield
        finally:
            holder.kill()
