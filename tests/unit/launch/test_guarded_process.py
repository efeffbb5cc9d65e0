from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from sparkdl.errors import LaunchError
from sparkdl.launch.forkserver import guard
from sparkdl.launch.forkserver.guard import GuardedProcess
from tests.collective.eventually import eventually
from tests.unkillable import unseen_end


def children() -> set[int]:
    """The processes that this one has started and not reaped."""
    # By their parent: a listing by threads breaks off, or misses some, where a thread ends meanwhile.
    return {process.pid for process in psutil.Process().children()}


def test_process_that_cannot_be_guarded_is_ended_and_the_guard_is_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = children()
    monkeypatch.setattr(guard, "_SHELL", "/no/such/shell")
    with pytest.raises(LaunchError, match="guard .* cannot be started: /no/such/shell: No such file"):
        GuardedProcess(["sleep", "600"], environment=os.environ, on_exit=lambda: None)
    assert children() <= before  # what other tests left may end meanwhile


def test_process_that_is_not_seen_to_end_is_left_and_reaped_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "KILL_TIMEOUT_S", 0.2)
    before = children()
    process = GuardedProcess(["sleep", "600"], environment=os.environ, on_exit=lambda: None)
    with unseen_end(process.pid):
        begin = time.monotonic()
        process.end(grace_s=0.1)
        process.end(grace_s=0.1)
        assert time.monotonic() - begin < 10
        assert process.status is None
    assert process.exited.wait(10)
    assert process.status == -signal.SIGKILL
    assert eventually(lambda: children() <= before)
    for output in process.outputs:
        output.close()
