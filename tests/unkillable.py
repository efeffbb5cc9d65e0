"""Processes whose end after SIGKILL is not observed, like that of a process that waits in the kernel for a disk."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

HOLD = """
import ctypes, sys
PTRACE_SEIZE = 0x4206
arguments = [ctypes.c_long(PTRACE_SEIZE), ctypes.c_long(int(sys.argv[1])), None, None]
print(ctypes.CDLL(None).ptrace(*arguments), flush=True)
sys.stdin.read()
"""
"""Program that traces a process: while it runs, the parent of the traced process does not see its end."""


@contextmanager
def unseen_end(pid: int) -> Iterator[None]:
    """Keep this process from seeing the end of its child inside the block."""
    command = [sys.executable, "-c", HOLD, str(pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            if holder.stdout.readline() != b"0\n":
                pytest.skip("this machine does not let a process be traced")
            yield
        finally:
            holder.kill()
