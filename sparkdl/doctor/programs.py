"""Runs small programs with a deadline: what is asked of may hang, crash, or take Python with it. Runs anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def ask(command: Sequence[str], *, timeout_s: float) -> tuple[bool, str]:
    """Run a program; return whether it ended well, and what it printed, or why it did not."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout_s,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {timeout_s:g} s"
    except OSError as error:
        return False, error.strerror or str(error)
    text = done.stdout.strip()
    if done.returncode == 0:
        return True, text
    last = text.splitlines()[-1] if text else f"ended with status {done.returncode}"
    return False, last


def ask_python(code: str, *, timeout_s: float) -> tuple[bool, str]:
    """Run a line of Python in a process of its own; likewise."""
    return ask([sys.executable, "-c", code], timeout_s=timeout_s)
