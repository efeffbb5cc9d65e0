"""``sparkdl run --min --max``: ranks that are lost, started again, added and taken away by hand."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparkdl.cli import main
from tests.collective.eventually import eventually
from tests.launchers import environment, run, write_script
from tests.processes import wait_until_gone

SPARKDL = (sys.executable, "-m", "sparkdl.cli", "run")

BEGINNING = """
import os, signal, sys, time
import torch
import torch.distributed as dist
folder = pathlib.Path(sys.argv[1])
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(optimizer, epoch, rank, size):
    "Train, note the number of ranks, and kill rank 1 once if it is to be killed; return whether to go on."
    if epoch == 3 and rank == 1 and (folder / "kill").exists():
        (folder / "kill").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)  # so that ranks can come while others train
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    if rank == 0:
        with open(folder / "sizes", "a") as file:
            file.write(f"{epoch} {size}\\n")
    return not (folder / "stop").exists()
"""

WITH_A_STATE = (
    BEGINNING
    + """
from sparkdl.runner import TrainingState
dist.init_process_group(BACKEND)
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = TrainingState(model=model, optimizer=optimizer, epoch=0, goes_on=True)
while state.goes_on:
    goes_on = torch.tensor(step(optimizer, state.epoch, dist.get_rank(), dist.get_world_size()) + 0.0)
    dist.broadcast(goes_on, 0)
    state.goes_on = bool(goes_on)
    state.epoch += 1
    state.commit()
tell(dist.get_rank(), [os.getpid(), state.epoch, model.module.weight.sum().item()])
"""
)

FOR_HOROVOD = (
    BEGINNING
    + """
import sparkdl.horovod.torch as hvd
hvd.init()
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

@hvd.elastic.run
def train(state):
    while state.goes_on:
        goes_on = step(optimizer, state.epoch, hvd.rank(), hvd.size())
        state.goes_on = hvd.broadcast_object(goes_on, root_rank=0)
        state.epoch += 1
        state.commit()

state = hvd.elastic.TorchState(model, optimizer, epoch=0, goes_on=True)
train(state)
tell(hvd.rank(), [os.getpid(), state.epoch, model.weight.sum().item()])
"""
)

PLAIN = (
    BEGINNING
    + """
dist.init_process_group()
with open(folder / "begun", "a") as file:
    file.write(f"{os.getpid()}\\n")
for epoch in range(6):
    step(optimizer, epoch, dist.get_rank(), dist.get_world_size())
    dist.barrier()
tell(dist.get_rank(), os.getpid())
"""
)


@contextmanager
def running(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A command with its output in files; it is killed at the end."""
    with open(folder / f"out-{len(words)}", "w") as out, open(folder / f"err-{len(words)}", "w") as err:
        process = subprocess.Popen(
            [*SPARKDL, *words], cwd=folder, env=environment(), stdout=out, stderr=err, text=True
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def sizes(folder: Path) -> list[int]:
    """The number of ranks in each step that has been made."""
    path = folder / "sizes"
    return [int(line.split()[1]) for line in path.read_text().splitlines()] if path.exists() else []


def told(folder: Path) -> dict[int, list[float]]:
    return {
        int(path.stem.removeprefix("rank-")): json.loads(path.read_text()) for path in folder.glob("rank-*")
    }


def invitation(folder: Path) -> str | None:
    """The file that the run of five words has named to those who want to join."""
    found = re.search(r"sparkdl run --join (\S+) -n 1", (folder / "err-5").read_text())
    return None if found is None else found[1]


@pytest.mark.parametrize(
    "source",
    [
        WITH_A_STATE.replace("BACKEND", '"sparkdl"'),
        pytest.param(WITH_A_STATE.replace("BACKEND", '"gloo"'), marks=pytest.mark.slow),
        FOR_HOROVOD,
    ],
)
def test_a_script_that_loses_a_rank_continues_and_takes_in_another(tmp_path: Path, source: str) -> None:
    (tmp_path / "kill").touch()
    script = str(write_script(tmp_path, source))
    with running(tmp_path, "--min", "1", script, str(tmp_path)) as process:
        assert eventually(lambda: sizes(tmp_path)[-1:] == [2] and 1 in sizes(tmp_path), timeout_s=120)
        (tmp_path / "stop").touch()
        assert process.wait(120) == 0
    errors = (tmp_path / "err-4").read_text()
    assert "The run continues with 1 rank, without member 1." in errors
    assert "The run continues with 2 ranks, with member 2 in addition." in errors
    (_, epochs, weight), other = told(tmp_path).values()
    assert other[1:] == [epochs, weight]
    assert len(sizes(tmp_path)) - epochs in (0, 1)  # the step in flight is repeated


def test_ranks_are_added_from_another_terminal_and_leave_after_a_step(tmp_path: Path) -> None:
    script = str(write_script(tmp_path, WITH_A_STATE.replace("BACKEND", '"sparkdl"')))
    with running(tmp_path, "-n1", "--max", "3", script, str(tmp_path)) as process:
        assert eventually(lambda: invitation(tmp_path) is not None, timeout_s=60)
        file = Path(invitation(tmp_path) or "")
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
        with running(tmp_path, "--join", str(file)) as joined:
            assert eventually(lambda: sizes(tmp_path)[-1:] == [3], timeout_s=120)
            joined.send_signal(signal.SIGINT)
            assert eventually(lambda: sizes(tmp_path)[-1:] == [1], timeout_s=60)
            assert joined.wait(60) == 0
        (tmp_path / "stop").touch()
        assert process.wait(120) == 0
    assert not file.exists()
    errors = (tmp_path / "err-5").read_text()
    assert "The run continues with 1 rank, without members 1, 2." in errors
    assert "lost" not in errors
    _, epochs, _ = told(tmp_path)[0]
    assert len(sizes(tmp_path)) == epochs  # no step was repeated


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
    done = run(
        [*SPARKDL, "--max", "2", write_script(tmp_path, "raise SystemExit(3)")], cwd=tmp_path, variables={}
    )
    assert done.returncode == 3
    assert "SystemExit: 3" in done.stderr


def test_ranks_end_with_their_run(tmp_path: Path) -> None:
    source = "import os, time\ntell(0, os.getpid())\ntime.sleep(600)"
    with running(tmp_path, "-n1", "--max", "1", str(write_script(tmp_path, source))) as process:
        assert eventually(lambda: bool(told(tmp_path)), timeout_s=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    wait_until_gone([int(told(tmp_path)[0])], timeout_s=60)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--min", "3", "-n", "2", "x.py"), "-n 2 has to be between --min 3 and --max 2"),
        (("--min", "2", "--max", "1", "x.py"), "-n 1 has to be between --min 2 and --max 1"),
        (("--min", "0", "x.py"), "between --min 0"),
        (("--max", "2", "--max-restarts", "-1", "x.py"), "--max-restarts cannot be negative"),
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
        assert eventually(lambda: invitation(tmp_path) is not None, timeout_s=60)
        with running(tmp_path, "--join", str(invitation(tmp_path))) as joined:
            assert eventually(lambda: sizes(tmp_path)[-1:] == [2], timeout_s=120)
            os.kill(joined.pid, signal.SIGKILL)
            assert eventually(lambda: sizes(tmp_path)[-1:] == [1], timeout_s=60)
        with running(tmp_path, "--join", str(invitation(tmp_path)), "-n2") as joined:
            assert eventually(
                lambda: sizes(tmp_path)[-1:] == [2], timeout_s=120
            )  # the second slot stays free
            (tmp_path / "stop").touch()
            assert process.wait(120) == 0
            assert joined.wait(60) == 0
