from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparkdl
from sparkdl.launch.rank import process, stacks
from sparkdl.launch.rank.stacks import MAX_STACK_CHARS, StackFile, name_threads, process_state

PACKAGE = Path(sparkdl.__file__).parent

DUMP = f"""Thread 0x00000000000000aa (most recent call first):
  File "/lib/reader.py", line 3 in read

Thread 0x00000000000000bb (most recent call first):
  File "{PACKAGE}/collective/native/communicator.py", line 45 in _run

Current thread 0x00000000000000cc (most recent call first):
  File "/home/me/train.py", line 12 in load
  File "{process.__file__}", line 91 in _call
  File "<frozen runpy>", line 88 in _run_code
"""


def test_main_thread_is_named_first_and_threads_of_sparkdl_are_left_out() -> None:
    named = name_threads(DUMP, {str(0xAA): "reader", str(0xCC): "MainThread"})
    assert named == (
        "Thread MainThread (most recent call first):\n"
        '  File "/home/me/train.py", line 12 in load\n'
        "Thread reader (most recent call first):\n"
        '  File "/lib/reader.py", line 3 in read'
    )


def test_thread_without_a_name_keeps_its_number() -> None:
    assert name_threads(DUMP, {}).startswith("Thread 0x00000000000000aa (most recent call first):")


def test_stacks_that_never_end_are_cut() -> None:
    frame = '  File "/home/me/deep.py", line 1 in down\n'
    long = "Current thread 0x00000000000000cc (most recent call first):\n" + frame * 5000
    named = name_threads(long, {})
    assert len(named) <= MAX_STACK_CHARS + 4
    assert named.endswith("...")


def test_process_that_does_not_answer_has_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "TAKE_TIMEOUT_S", 0.3)
    file = StackFile()
    ignores = (
        "import signal; signal.signal(signal.SIGRTMIN + 8, signal.SIG_IGN); print(1, flush=True); input()"
    )
    command = [sys.executable, "-c", ignores]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert file.take(process.pid, {}) == ""
        assert process_state(process.pid) == ""
        process.communicate(b"\n")
    file.close()
    assert process_state(2**22 + os.getpid()) == ""
