"""Scripts for ``sparkdl run`` with ranks that come and go, and commands that run beside the test."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.collective.eventually import eventually
from tests.launchers import environment

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
def running(
    folder: Path, *words: str, name: str = "run", place: Sequence[str] = (), **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """``sparkdl run`` with these words, and its errors in a file of this name; it is killed at the end."""
    with open(folder / name, "w") as errors:
        process = subprocess.Popen(
            [*place, *SPARKDL, *words],
            cwd=folder,
            env=environment(**variables),
            stdout=subprocess.DEVNULL,
            stderr=errors,
            text=True,
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


def invitation(folder: Path) -> Path:
    """The file that the run names to those who want to join."""

    def found() -> re.Match[str] | None:
        return re.search(r"sparkdl run --join (\S+) -n 1", (folder / "run").read_text())

    assert eventually(lambda: found() is not None, timeout_s=60)
    match = found()
    assert match is not None
    return Path(match[1])
