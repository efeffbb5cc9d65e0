"""Programs submitted to a cluster by spark-submit, and the job that the tests submit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.processes import wait_until_gone
from tests.standalone.cluster import ROOT, SPARK_HOME, StandaloneCluster

SCRIPT = ROOT / "sparkdl" / "jobs" / "script" / "sparkdl_job.py"
TIMEOUT_S = 240.0

NETS = '''\
import os
import time
from pathlib import Path

import torch.distributed as dist
from torch import nn


def make_net(hidden=8):
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3))


class Loss(nn.Module):
    """Cross-entropy that says in a folder where it is computed, and in its 20th step waits while a file is there."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.calls = folder, 0

    def extra_repr(self):
        return ""

    def forward(self, outputs, labels):
        import sparkdl

        self.calls += 1
        if dist.is_initialized():
            told = f"{os.getpid()} {sparkdl.__file__}"
            Path(self.folder, f"rank-{dist.get_rank()}").write_text(told)
            while self.calls == 20 and Path(self.folder, "hold").exists():
                Path(self.folder, f"held-{dist.get_rank()}").touch()
                time.sleep(0.05)
        return nn.functional.cross_entropy(outputs, labels)


class FailingLoss(Loss):
    def forward(self, outputs, labels):
        if dist.is_initialized() and self.calls == 3:
            raise ValueError("no such loss")
        return super().forward(outputs, labels)
'''

JOB = """\
data:
  parquet: {rows}
  validation: is_test
model:
  import: my_nets:make_net
  arguments: {{hidden: 16}}
params:
  optimizer: {{import: "torch.optim:SGD", arguments: {{lr: 0.5, momentum: 0.9}}}}
  loss: {{import: "my_nets:Loss", arguments: {{folder: {folder}}}}}
  featuresCol: image
  labelCol: digit
  batchSize: 16
  epochs: 5
  numWorkers: 2
  seed: 7
  store: {folder}/store
  checkpointDir: {folder}/checkpoints
  showProgress: false
tracking: off
output: {folder}/out
"""


def write_job(folder: Path, rows: Path) -> Path:
    """Write a job, and the module of its network and loss, into a new folder."""
    (folder / "job").mkdir(parents=True)
    (folder / "job" / "my_nets.py").write_text(NETS)
    file = folder / "job" / "job.yaml"
    file.write_text(JOB.format(rows=rows, folder=folder))
    return file


def submit_command(
    cluster: StandaloneCluster,
    program: Sequence[str | Path],
    settings: Mapping[str, str] | None = None,
    *options: str,
) -> list[str]:
    """Return the spark-submit command of a program with its arguments, in client mode unless options say otherwise."""
    small = {"spark.executor.memory": "512m", "spark.driver.memory": "512m", "spark.ui.enabled": "false"}
    pairs = [f"{name}={value}" for name, value in {**small, **(settings or {})}.items()]
    return [
        str(SPARK_HOME / "bin" / "spark-submit"),
        *("--master", cluster.url, "--properties-file", str(cluster.folder / "spark-defaults.conf")),
        *(part for pair in pairs for part in ("--conf", pair)),
        *options,
        *map(str, program),
    ]


def train_command(*arguments: str | Path) -> list[str]:
    """Return the ``sparkdl train`` command with arguments."""
    return command("train", *arguments)


def command(name: str, *arguments: str | Path) -> list[str]:
    """Return a command of ``sparkdl`` with arguments."""
    return [sys.executable, "-m", "sparkdl.cli", name, *map(str, arguments)]


def environment(**changes: str) -> dict[str, str]:
    """Return a user's environment: none of MLflow's and pyspark's variables are set."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "PYSPARK_"))
    }
    return {
        **inherited,
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        **changes,
    }


@dataclass(frozen=True)
class Ended:
    """How a program ended, and its whole output; spark-submit redirects its Python program to stdout."""

    code: int
    said: str


def run(command: Sequence[str], folder: Path, **changes: str) -> Ended:
    """Run a program in a folder until it ends."""
    with started(command, folder, **changes) as process:
        said, _ = process.communicate(timeout=TIMEOUT_S)
    return Ended(process.returncode, said)


@contextmanager
def started(command: Sequence[str], folder: Path, **changes: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program; at the end of the block kill it and its descendants if it still runs."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def wait_for_files(process: subprocess.Popen[str], *files: Path) -> None:
    """Wait until a program or its ranks have written files."""
    deadline, pause = time.monotonic() + TIMEOUT_S, threading.Event()
    while not all(file.exists() for file in files):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{files} are not there after {TIMEOUT_S:g} s"
        pause.wait(0.05)


def rank_pids(folder: Path) -> list[int]:
    """Return the pids of the ranks, which the job's loss has written."""
    return [int(path.read_text().split()[0]) for path in sorted(folder.glob("rank-*"))]


def assert_gone(pids: Sequence[int]) -> None:
    """Assert that processes end without being killed."""
    assert pids
    assert wait_until_gone(pids, 60.0) == []
