"""The facts that are found about this machine, with some libraries hidden."""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest

import sparkdl._native
from sparkdl.doctor import machine_facts
from sparkdl.doctor.machine_facts import ask, ask_python, look_around
from tests.unkillable import HOLD


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The library of an installed torchvision's operators, which is to be loaded without importing torchvision."""
    folder = tmp_path / "torchvision"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('is not to be imported')\n")
    (tmp_path / "torchvision-0.1.dist-info").mkdir()
    (tmp_path / "torchvision-0.1.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder / "_C.so"


def test_hidden_and_damaged_libraries_are_reported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, torchvision: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("SPARKDL_NCCL_LIBRARY", str(tmp_path / "libnccl.so"))
    # An import of mpi4py finds this module instead.
    (tmp_path / "mpi4py.py").write_text("raise ImportError('hidden by a test')\n")
    torchvision.write_text("for another torch")
    facts = look_around(timeout_s=60)
    assert facts.java == (False, f"{tmp_path}/nowhere/bin/java: No such file or directory")
    assert not facts.nccl[0]
    assert "NCCL is not available" in facts.nccl[1]
    assert not facts.mpi[0]
    assert "hidden by a test" in facts.mpi[1]
    could_load, said = facts.torchvision or (None, "")
    assert could_load is False
    assert said.startswith(f"0.1, beside torch {metadata.version('torch')}")
    assert f": {torchvision}: " in said
    assert facts.native == (True, "loaded")
    assert facts.executable == sys.executable
    assert "sparkdl" in facts.packages


def test_torchvision_is_checked_by_loading_the_library_of_its_operators(torchvision: Path) -> None:
    shutil.copyfile(sparkdl._native.__file__, torchvision)
    assert look_around(timeout_s=60).torchvision == (True, "0.1")


def test_question_that_hangs_or_crashes_has_an_answer() -> None:
    assert ask_python("import time; time.sleep(600)", timeout_s=0.5) == (False, "no answer within 0.5 s")
    assert ask_python("import os; os.abort()", timeout_s=60) == (False, "ended with status -6")
    assert ask(["/no/such/program"], timeout_s=1) == (False, "No such file or directory")


def test_program_that_cannot_be_reaped_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine_facts, "END_TIMEOUT_S", 0.2)
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    hold_myself = (
        "import os, subprocess, sys, time\n"
        f"command = [sys.executable, '-c', {HOLD!r}, str(os.getpid())]\n"
        f"subprocess.Popen(command, stdin=open({str(fifo)!r}))\n"
        "time.sleep(600)"
    )
    held = os.open(fifo, os.O_RDWR)
    try:
        assert ask([sys.executable, "-c", hold_myself], timeout_s=3) == (False, "no answer within 3 s")
    finally:
        os.close(held)
