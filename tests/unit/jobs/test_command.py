from __future__ import annotations

import json
import os
import runpy
import signal
import sys

import pytest

from sparkdl import errors
from sparkdl.cli import main
from sparkdl.jobs import command
from sparkdl.jobs.command import Terminated, ends_when_asked, exit_code
from tests.unit.jobs.job_files import write_job


@pytest.mark.parametrize(
    "order",
    [
        ("JOB", "epohcs=3"),
        ("--dry-run", "JOB", "epochs=3", "epohcs=3"),
        ("JOB", "--dry-run", "epochs=3", "epohcs=3"),
        ("JOB", "epochs=3", "--dry-run", "epohcs=3", "--again"),
    ],
    ids=" ".join,
)
def test_a_wrong_value_among_options_in_any_order_ends_with_2_and_one_line(tmp_path, capsys, order):
    file = str(write_job(tmp_path))
    assert main(["train", *(file if part == "JOB" else part for part in order)]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("sparkdl: the argument 'epohcs=3': params.epohcs: ")
    assert line.endswith("Did you mean epochs?")
    assert said.out == ""


def test_unknown_option_ends_with_the_usage(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", str(write_job(tmp_path)), "--dry-rum"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: sparkdl train [-h] [--dry-run] [--again] JOB.yaml [KEY=VALUE ...]\n")
    assert said.endswith("sparkdl train: error: unrecognized arguments: --dry-rum\n")


def test_output_folder_that_no_job_wrote_is_refused_before_spark_starts(tmp_path, capsys):
    file = write_job(tmp_path)
    (tmp_path / "thesis.tex").touch()
    assert main(["train", str(file), f"output={tmp_path}"]) == 2
    assert "was not written by a job" in capsys.readouterr().err


def test_with_logformat_json_the_error_of_a_job_is_an_event(tmp_path, capsys):
    file = write_job(tmp_path)
    (tmp_path / "thesis.tex").touch()
    assert main(["train", str(file), f"output={tmp_path}", "logFormat=json"]) == 2
    said = capsys.readouterr()
    event = json.loads(said.err)
    assert [*event] == ["time", "event", "type", "text"]
    assert (event["event"], event["type"]) == ("error", "ParamError")
    assert "was not written by a job" in event["text"]
    assert said.out == ""


def test_job_script_prints_a_program_that_takes_the_same_arguments(tmp_path, capsys, monkeypatch):
    assert main(["job-script"]) == 0
    path = capsys.readouterr().out.strip()
    assert {*os.listdir(os.path.dirname(path))} - {"__pycache__"} == {"sparkdl_job.py"}
    monkeypatch.setattr(sys, "argv", [path, str(write_job(tmp_path)), "epochs=none"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(path, run_name="__main__")
    assert ended.value.code == 2
    assert "Param epochs takes a whole number, got 'none'" in capsys.readouterr().err


def test_sigterm_is_raised_once_and_only_inside_the_block():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), ends_when_asked():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([signal.SIGUSR1], 5)  # the signal arrives during this wait
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # must not disturb the ending
    assert signal.getsignal(signal.SIGTERM) == before


def test_missing_library_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        command.importlib.util, "find_spec", lambda name: None if name == "ruamel.yaml" else object()
    )
    assert main(["train", str(write_job(tmp_path))]) == 2
    assert "Run pip install ruamel.yaml, or install sparkdl with its extra 'train'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.JobFileError("x"), 2),
        (errors.ParamError("x"), 2),
        (errors.ParamTypeError("x"), 2),
        (errors.DataError("x"), 1),
        (errors.StoreError("x"), 1),
        (errors.LaunchError("x"), 1),
        (errors.RankError("x", rank=0, host="h"), 1),
        (errors.CheckpointError("x"), 1),
        (ZeroDivisionError("x"), 1),
        (errors.RankDiedError("x", rank=0, host="h"), 75),
        (errors.HangError("x", rank=0, host="h"), 75),
        (errors.HangError("x", rank=0, host="h", is_in_code=True), 1),
        (errors.ExecutorsLostError("x"), 75),
        (errors.ClusterLostError("x"), 75),
        (errors.SlotsMissingError("x"), 75),
        (errors.CheckpointsInUseError("x"), 75),
        (KeyboardInterrupt(), 130),
        (Terminated(), 143),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_exit_code_of_an_exception(error, code):
    assert exit_code(error) == code
