"""``sparkdl top`` shows what running monitors keep in their files."""

from __future__ import annotations

import fcntl
import io
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sparkdl.cli import main
from sparkdl.monitor.board import Snapshot, figures_of
from sparkdl.monitor.exports import StatusFile, status_folder
from sparkdl.monitor.top import as_tables, running_snapshots
from tests.unit.monitor.samples import sample

SNAPSHOT = Snapshot(
    name="fit of digits",
    number=7,
    at=time.time(),
    began_at=time.time() - 65,
    position={"epoch": 2, "epochs": 3, "step": 4, "steps": 10, "loss": 0.51234, "eta_s": 90.0},
    ranks=figures_of({0: sample(0), 1: sample(1, communicating_s=0.0, rows=40)}),
)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatusFile]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    file = StatusFile()
    file.show(SNAPSHOT)
    yield file
    file.close()


def test_a_fit_is_shown_with_its_progress_and_its_ranks(
    running: StatusFile, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--once"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0].startswith("fit of digits  epoch 2/3  step 4/10  loss 0.5123  ETA 0:01:30  for 0:01:05  ")
    assert lines[1].startswith("2 ranks  60 rows/s  4 GFLOP/s  20.0% of the peak (MFU)  88% of the time not ")
    header, first, second = (re.split(r"\s{2,}", line.strip()) for line in lines[2:])
    assert header[:4] == ["rank", "host", "rows/s", "FLOP/s"]
    assert "tokens/s" not in header
    assert "GPU" not in header
    values = dict(zip(header, second[: len(header)], strict=False))
    assert (values["rank"], values["host"], values["rows/s"], values["MFU"]) == ("1", "host-1", "20", "20%")
    assert (values["compute"], values["communicate"], values["read"]) == ("75%", "0%", "25%")
    assert (first[0], values["slowness"]) == ("0", "3.00x")


def test_slow_ranks_are_shown_in_colour() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, color_system="standard", width=160)
    console.print(as_tables([SNAPSHOT], 160))
    *_, first, second = output.getvalue().rstrip().splitlines()
    assert "\x1b[33m" not in first
    assert "\x1b[33m" in second


def test_columns_of_tokens_and_gpus_come_with_their_values() -> None:
    output = io.StringIO()
    ranks = figures_of({0: sample(0, tokens=2000, gpu_load=0.5, gpu_memory_bytes=7e9)})
    Console(file=output, width=200).print(as_tables([replace(SNAPSHOT, ranks=ranks)], 200))
    text = output.getvalue()
    assert "1,000 tokens/s" in text
    assert "GPU memory" in text
    assert "7 GB" in text


@pytest.mark.parametrize("more", [{}, {"tokens": 2000, "gpu_load": 0.5, "gpu_memory_bytes": 7e9}])
def test_tables_fit_into_a_narrow_terminal(more: dict[str, float]) -> None:
    output = io.StringIO()
    ranks = figures_of({0: sample(0, **more)})
    Console(file=output, width=80).print(as_tables([replace(SNAPSHOT, ranks=ranks)], 80))
    header, _ = output.getvalue().splitlines()[-2:]
    assert len(header) <= 80
    assert {"rank", "host", "rows/s", "compute", "communicate", "read"} <= set(header.split())


def test_it_shows_new_figures_and_ends_with_the_fit(
    running: StatusFile, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses: list[int] = []
    shown = threading.Thread(
        target=lambda: statuses.append(main(["top", "--seconds", "0.05", str(os.getpid())]))
    )
    shown.start()
    running.show(replace(SNAPSHOT, name="fit of letters"))
    running.close()
    shown.join(120)
    assert statuses in ([0], [1])  # it may have looked when the fit had ended
    if statuses == [0]:
        assert "ended." in capsys.readouterr().out


DRIVER = """
import sys, tempfile
from sparkdl.monitor.board import Snapshot
from sparkdl.monitor.exports import StatusFile
tempfile.tempdir = sys.argv[1]
file = StatusFile()
file.show(Snapshot(name="fit of letters", number=1, at=1.0, began_at=0.0))
print(flush=True)
sys.stdin.read()
"""


def test_a_fit_whose_driver_was_killed_is_not_shown_and_its_file_is_removed(
    running: StatusFile, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        driver.stdout.readline()
        assert [snapshot.name for snapshot in running_snapshots()] == ["fit of letters", "fit of digits"]
        driver.kill()
        driver.wait()
    assert [snapshot.name for snapshot in running_snapshots()] == ["fit of digits"]
    running.show(SNAPSHOT)
    assert len(list(status_folder().iterdir())) == 1


@pytest.mark.parametrize("content", ['{"pid": 1}', '{"ranks": {"0": {"speed": 1}}}', "no JSON"])
def test_files_of_other_versions_are_left_out_and_stay(running: StatusFile, content: str) -> None:
    with (status_folder() / "1-1.json").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(content)
        file.flush()
        assert [snapshot.name for snapshot in running_snapshots()] == ["fit of digits"]
        assert len(list(status_folder().iterdir())) == 2


def test_it_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert running_snapshots() == []
    assert list(tmp_path.iterdir()) == []


def test_it_says_how_to_monitor_if_nothing_is(
    running: StatusFile, capsys: pytest.CaptureFixture[str]
) -> None:
    running.close()
    assert main(["top"]) == 1
    assert "Start one with monitor=sparkdl.monitor.Monitor()." in capsys.readouterr().out


def test_a_fit_that_begins_has_no_ranks_yet(running: StatusFile, capsys: pytest.CaptureFixture[str]) -> None:
    running.show(replace(SNAPSHOT, ranks={}, position={}))
    assert main(["top", "--once"]) == 0
    assert "The ranks have not sent a sample yet." in capsys.readouterr().out


def test_bad_options_and_a_missing_library_are_named(
    running: StatusFile, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["top", "--seconds", "0"]) == 2
    assert "--seconds must be between 0.05 and 3600, got 0." in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["top"]) == 2
    assert "sparkdl top needs rich" in capsys.readouterr().err
