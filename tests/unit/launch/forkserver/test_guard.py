from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from sparkdl.errors import LaunchError
from sparkdl.launch.forkserver import guard
from sparkdl.launch.forkserver.guard import GuardedProcess
from tests.collective.eventually import eventually
from tests.processes import wait_until_gone
from tests.unkillable import unseen_end


def test_guard_ends_the_group_when_its_starter_dies() -> None:
    starter = (
        "import os, sys; from sparkdl.launch.forkserver.guard import GuardedProcess;"
        "process = GuardedProcess(['sleep', '600'], environment=os.environ, on_exit=lambda: None);"
        "print(process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    started = subprocess.run(
        [sys.executable, "-c", starter], check=False, timeout=300, stdout=subprocess.PIPE
    )
    assert wait_until_gone([int(started.stdout)]) == []


def children() -> set[int]:
    """The children of this process that have not been reaped."""
    # By their parent: a listing by threads is incomplete if a thread ends while it is read.
    return {process.pid for process in psutil.Process().children()}


def test_process_that_cannot_be_guarded_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = children()
    monkeypatch.setattr(guard, "SHELL", "/no/such/shell")
    with pytest.raises(LaunchError, match="guard .* cannot be started: /no/such/shell: No such file"):
        GuardedProcess(["sleep", "600"], environment=os.environ, on_exit=lambda: None)
    assert children() <= before  # processes of other tests may end meanwhile


def test_process_whose_end_is_not_seen_is_abandoned_and_reaped_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "KILL_TIMEOUT_S", 0.2)
    before = children()
    process = GuardedProcess(["sleep", "600"], environment=os.environ, on_exit=lambda: None)
    with unseen_end(process.pid):
        process.end(grace_s=0.1)  # returns, although the end is not observed
        process.end(grace_s=0.1)
        assert process.status is None
    assert process.exited.wait(10)
    assert process.status == -signal.SIGKILL
    assert eventually(lambda: children() <= before)
    for output in process.outputs:
        output.close()
