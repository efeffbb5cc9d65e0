from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparkdl.errors import LaunchError
from sparkdl.launch import process_guard
from sparkdl.launch.guarded_process import GuardedProcess


def children() -> set[str]:
    """The processes that this one has started and not reaped."""
    return {
        pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
    }


def test_process_that_cannot_be_guarded_is_ended_and_the_guard_is_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = children()
    monkeypatch.setattr(process_guard, "_SHELL", "/no/such/shell")
    with pytest.raises(LaunchError, match="guard .* cannot be started: /no/such/shell: No such file"):
        GuardedProcess(["sleep", "600"], environment=os.environ, on_exit=lambda: None)
    assert children() == before
