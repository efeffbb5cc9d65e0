"""Runs small programs with a deadline: what is asked of may hang, crash, or take Python with it. Runs anywhere."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence

_END_TIMEOUT_S = 5.0
"""How long a program that was killed may take to be gone; one that waits for a disk or a GPU may never be."""


def ask(command: Sequence[str], *, timeout_s: float) -> tuple[bool, str]:
    """Run a program; return whether it ended well, and what it printed, or why it did not."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        )
    except OSError as error:
        return False, error.strerror or str(error)
    try:
        text = process.communicate(timeout=timeout_s)[0].strip()
    except subprocess.TimeoutExpired:
        return False, f"no answer within {timeout_s:g} s"
    finally:
        _end(process)
    if process.returncode == 0:
        return True, text
    last = text.splitlines()[-1] if text else f"ended with status {process.returncode}"
    return False, last


def _end(process: subprocess.Popen[str]) -> None:
    """End a program, unless it has ended; what SIGKILL does not end is left to itself."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_TIMEOUT_S)
    assert process.stdout is not None
    process.stdout.close()


def ask_python(code: str, *, timeout_s: float) -> tuple[bool, str]:
    """Run a line of Python in a process of its own; likewise."""
    return ask([sys.executable, "-c", code], timeout_s=timeout_s)
