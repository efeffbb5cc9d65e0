from __future__ import annotations

import signal
import subprocess
import sys

from sparkdl.launch.forkserver.guard import ProcessGuard


def test_guard_ends_the_group_when_its_starter_dies() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    starter = (
        "import os, sys; from sparkdl.launch.forkserver.guard import ProcessGuard;"
        f"guard = ProcessGuard({sleeper.pid}); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", starter], check=False, timeout=30)
    assert sleeper.wait(10) == -signal.SIGKILL


def test_released_guard_leaves_the_group_alone() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        ProcessGuard(process.pid).release()
        process.communicate(b"\n", timeout=30)
    assert process.returncode == 0
