"""``sparkdl run --min --max``: ranks that are lost, started again, added and taken away by hand."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from sparkdl.cli import main
from tests.cli.elastic_scripts import (
    FOR_HOROVOD,
    PLAIN,
    SPARKDL,
    WITH_A_STATE,
    invitation,
    running,
    sizes,
    told,
)
from tests.collective.eventually import eventually
from tests.launchers import run, write_script
from tests.processes import wait_until_gone


@pytest.mark.parametrize(
    "source",
    [
        WITH_A_STATE.replace("BACKEND", '"sparkdl"'),
        pytest.param(WITH_A_STATE.replace("BACKEND", '"gloo"'), marks=pytest.mark.slow),
        pytest.param(FOR_HOROVOD, marks=pytest.mark.slow),
    ],
)
def test_a_script_that_loses_a_rank_continues_and_takes_in_another(tmp_path: Path, source: str) -> None:
    (tmp_path / "kill").touch()
    script = str(write_script(tmp_path, source))
    with running(tmp_path, "--min", "1", script, str(tmp_path)) as process:
        assert eventually(lambda: sizes(tmp_path)[-1:] == [2] and 1 in sizes(tmp_path), timeout_s=120)
        (tmp_path / "stop").touch()
        assert process.wait(120) == 0
    errors = (tmp_path / "run").read_text()
    assert "The run continues with 1 rank, without member 1." in errors
    assert "The run continues with 2 ranks, with member 2 in addition." in errors
    (_, epochs, weight), other = told(tmp_path).values()
    assert other[1:] == [epochs, weight]
    assert len(sizes(tmp_path)) - epochs in (0, 1)  # the step in flight is repeated


def test_ranks_are_added_from_another_terminal_and_leave_after_a_step(tmp_path: Path) -> None:
    script = str(write_script(tmp_path, WITH_A_STATE.replace("BACKEND", '"sparkdl"')))
    with running(tmp_path, "-n1", "--max", "3", script, str(tmp_path)) as process:
        file = invitation(tmp_path)
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
        with running(tmp_path, "--join", str(file), name="join") as joined:
            assert eventually(lambda: sizes(tmp_path)[-1:] == [3], timeout_s=120)
            joined.send_signal(signal.SIGINT)
            assert eventually(lambda: sizes(tmp_path)[-1:] == [1], timeout_s=60)
            assert joined.wait(60) == 0
        (tmp_path / "stop").touch()
        assert process.wait(120) == 0
    assert not file.exists()
    errors = (tmp_path / "run").read_text()
    assert "The run continues with 1 rank, without members 1, 2, as asked." in errors
    assert "lost" not in errors
    _, epochs, _ = told(tmp_path)[0]
    assert len(sizes(tmp_path)) == epochs  # no step was repeated


@pytest.mark.slow  # tests/runner/test_elastic_worlds.py has such functions daily
def test_a_script_without_a_state_begins_anew_in_new_processes(tmp_path: Path) -> None:
    (tmp_path / "kill").touch()
    done = run(
        [*SPARKDL, "--min", "1", "--", write_script(tmp_path, PLAIN), tmp_path], cwd=tmp_path, variables={}
    )
    assert done.returncode == 0, done.stderr
    begun = (tmp_path / "begun").read_text().split()
    assert len(begun) == len(set(begun)) == 4
    assert {str(pid) for pid in told(tmp_path).values()} == set(begun[2:])
    assert sizes(tmp_path)[-6:] == [2] * 6


def test_exit_status_is_that_of_the_script(tmp_path: Path) -> None:
    script = write_script(
        tmp_path, "import os\nprint(os.environ['MLFLOW_TRACKING_TOKEN'])\nraise SystemExit(3)"
    )
    command = [*SPARKDL, "--max", "2", "-n1", "--", sys.executable, script]
    done = run(command, cwd=tmp_path, variables={"MLFLOW_TRACKING_TOKEN": "token"})
    assert done.returncode == 3
    assert done.stdout == "[member 0] token\n"  # which ranks of a Runner do not get
    assert "SystemExit: 3" in done.stderr


def test_ranks_end_with_their_run(tmp_path: Path) -> None:
    source = "import os, time\ntell(0, os.getpid())\ntime.sleep(600)"
    with running(tmp_path, "-n1", "--max", "1", str(write_script(tmp_path, source))) as process:
        assert eventually(lambda: bool(told(tmp_path)), timeout_s=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert wait_until_gone([int(told(tmp_path)[0])]) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--min", "3", "-n", "2", "x.py"), "-n 2 has to be between --min 3 and --max 2"),
        (("--min", "2", "--max", "1", "x.py"), "-n 1 has to be between --min 2 and --max 1"),
        (("--min", "0", "x.py"), "between --min 0"),
        (("--max", "2", "--max-restarts", "-1", "x.py"), "--max-restarts must be at least 0, got -1"),
        (("--max-restarts", "1", "x.py"), "give --min or --max as well"),
        (
            ("--min", "1", "--", "accelerate", "launch"),
            "takes a script that runs in .*, and not 'accelerate launch'",
        ),
        (("--min", "1", "missing.py"), "missing.py cannot be read"),
        (("--min", "1", "--transport", "mpi", "script.py"), "transport='mpi' cannot be elastic"),
        (("--join", "missing"), "missing cannot be read: No such file"),
        (("--join", "open"), "open holds a secret, and other users can read it"),
        (("--join", "other"), "other is not a file that `sparkdl run` has written"),
        (("--join", "other", "--min", "1"), "--min is chosen where the run was begun"),
        (("--join", "other", "script.py"), "leave out 'script.py'"),
    ],
)
def test_what_cannot_work_is_refused_before_ranks_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        signal, "signal", lambda *_: None
    )  # the handlers of the command are not for this process
    (tmp_path / "script.py").touch()
    (tmp_path / "open").write_text("{}")
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "other").write_text("[]")
    (tmp_path / "other").chmod(0o600)
    assert main(["run", *words]) == 2
    errors = capsys.readouterr().err
    assert re.search(message, errors), errors


@pytest.mark.slow
def test_ranks_whose_terminal_is_killed_are_lost_and_others_join_until_the_run_ends(tmp_path: Path) -> None:
    script = str(write_script(tmp_path, WITH_A_STATE.replace("BACKEND", '"sparkdl"')))
    with running(tmp_path, "-n1", "--max", "2", script, str(tmp_path)) as process:
        file = str(invitation(tmp_path))
        with running(tmp_path, "--join", file, name="join") as joined:
            assert eventually(lambda: sizes(tmp_path)[-1:] == [2], timeout_s=120)
            os.kill(joined.pid, signal.SIGKILL)
            assert eventually(lambda: sizes(tmp_path)[-1:] == [1], timeout_s=60)
        with running(tmp_path, "--join", file, "-n2", name="join") as joined:
            assert eventually(
                lambda: sizes(tmp_path)[-1:] == [2], timeout_s=120
            )  # the second slot stays free
            (tmp_path / "stop").touch()
            assert process.wait(120) == 0
            assert joined.wait(60) == 0
