"""SLURM itself runs the script of docs/deploy on two hosts, which are network namespaces with a ``slurmd`` each."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.collective.eventually import eventually
from tests.hosts.network import Network, hosts_with_ranks
from tests.launchers import ROOT, environment, told, write_script
from tests.processes import is_running, wait_until_gone

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")

# Without cgroups, so that it runs in a container, and with more cores than there are.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=n1(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=n1 NodeAddr=10.77.0.1 CPUs=32 State=UNKNOWN
NodeName=n2 NodeAddr=10.77.0.2 CPUs=32 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""

SCRIPT = """
import os, signal, socket, sys
import torch
import torch.distributed as dist
import sparkdl.torch
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("sparkdl")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs, targets = torch.randn(8, 3), torch.randn(8, 1)
model = torch.nn.Linear(3, 1)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
step, end = 0, sys.argv[1]
while step < 5 or end == "never":
    optimizer.zero_grad()
    loss = (parallel(inputs[rank::world_size]) - targets[rank::world_size]).square().mean()
    loss.backward()
    optimizer.step()
    step += 1
    if step == 3:
        weights = [value for weight in model.parameters() for value in weight.flatten().tolist()]
        names = os.environ["LOCAL_RANK"], os.environ["OMP_NUM_THREADS"], socket.gethostname()
        tell(rank, [*names, os.getpid(), weights])
        print("three steps", flush=True)
        if end == "killed" and rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
print("trained", flush=True)
"""


class Slurm:
    """A cluster of the hosts ``n1``, on which its commands run, and ``n2``."""

    def __init__(self, network: Network, folder: Path) -> None:
        self._network = network
        self._variables = environment(SLURM_CONF=str(folder / "slurm.conf"), VENV=sys.prefix)

    def start(self, host: int, *words: str | Path, log: Path) -> subprocess.Popen[bytes]:
        """Start a program on a host."""
        with log.open("wb") as output:
            return subprocess.Popen(
                self._command(host, words), env=self._variables, stdout=output, stderr=subprocess.STDOUT
            )

    def run(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of SLURM."""
        return subprocess.run(
            self._command(0, words),
            cwd=ROOT,
            env={**self._variables, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )

    def end_jobs(self) -> None:
        """End the jobs that a failed test has left, whose ranks would outlive the daemons."""
        self.run("scancel", "--user=root")
        assert eventually(self.has_no_jobs, timeout_s=60)

    def has_no_jobs(self) -> bool:
        """Whether all jobs have ended."""
        return self.run("squeue", "--noheader").stdout == ""

    def _command(self, host: int, words: tuple[str | Path, ...]) -> list[str]:
        named = f'hostname n{host + 1} && exec "$@"'
        return [*self._network.command(host), "unshare", "--uts", "sh", "-c", named, "sh", *map(str, words)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"{', '.join(missing)} missing; apt-get install slurm-wlm munge")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    (folder / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 n1\n10.77.0.2 n2\n")
    (folder / "munge.key").write_bytes(bytes(range(128)))
    (folder / "munge.key").chmod(0o400)
    (folder / "state").mkdir()
    with ExitStack() as stack:
        network = stack.enter_context(hosts_with_ranks(1, 1))
        for host in range(2):
            bind = ["mount", "--bind", str(folder / "hosts"), "/etc/hosts"]
            subprocess.run([*network.command(host), *bind], check=True, timeout=60)
        cluster = Slurm(network, folder)
        files = (("socket", "munge.socket"), ("key-file", "munge.key"), ("pid-file", "munge.pid"))
        munge = [f"--{option}={folder / name}" for option, name in (*files, ("log-file", "munge.log"))]
        daemons = (
            (0, ["munged", "--foreground", "--force", *munge]),
            (0, ["slurmctld", "-D"]),
            (0, ["slurmd", "-D"]),
            (1, ["slurmd", "-D"]),
        )
        for number, (host, words) in enumerate(daemons):
            process = cluster.start(host, *words, log=folder / f"{number}.log")
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            if number == 0:
                assert eventually((folder / "munge.socket").exists, timeout_s=30)
        assert eventually(lambda: "2 idle" in cluster.run("sinfo", "-h", "-o", "%D %t").stdout, timeout_s=60)
        stack.callback(cluster.end_jobs)
        yield cluster


def submit(slurm: Slurm, folder: Path, end: str) -> str:
    """Submit the script of the docs for four ranks, not eight, and return the number of the job."""
    size = ["--ntasks-per-node=2", "--cpus-per-task=1", f"--output={folder}/out.txt"]
    batch = ROOT / "docs" / "deploy" / "slurm" / "train.sbatch"
    submitted = slurm.run("sbatch", "--parsable", *size, batch, end, SCRIPT=str(write_script(folder, SCRIPT)))
    assert submitted.returncode == 0, submitted.stderr
    return submitted.stdout.strip()


def end_of(slurm: Slurm, job: str) -> tuple[str, str]:
    """Wait for the end of a job, and return its state and its exit code as SLURM writes it."""
    assert eventually(slurm.has_no_jobs, timeout_s=120)
    shown = dict(re.findall(r"(\w+)=(\S+)", slurm.run("scontrol", "show", "job", job).stdout))
    return shown["JobState"], shown["ExitCode"]


def test_ranks_of_two_hosts_train_one_model(slurm: Slurm, tmp_path: Path) -> None:
    ended = end_of(slurm, submit(slurm, tmp_path, "trained"))
    output = (tmp_path / "out.txt").read_text()
    assert ended == ("COMPLETED", "0:0"), output
    seen = told(tmp_path)
    assert [seen[rank][:3] for rank in range(4)] == [
        ["0", "1", "n1"],
        ["1", "1", "n1"],
        ["0", "1", "n2"],
        ["1", "1", "n2"],
    ]
    assert [values[4] for values in seen.values()] == [seen[0][4]] * 4
    assert {f"{rank}: trained" for rank in range(4)} <= {*output.splitlines()}


def test_a_killed_rank_ends_the_job_which_names_it(slurm: Slurm, tmp_path: Path) -> None:
    state, code = end_of(slurm, submit(slurm, tmp_path, "killed"))
    output = (tmp_path / "out.txt").read_text()
    # The highest status of the tasks: 143 if srun has ended others by SIGTERM before they ended by themselves.
    assert (state, code in ("137:0", "143:0")) == ("FAILED", True), output
    assert "srun: error: n2: task 3: Killed" in output
    assert "trained" not in output
    assert wait_until_gone([values[3] for values in told(tmp_path).values()]) == []


def test_scancel_ends_all_ranks(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "never")
    output = tmp_path / "out.txt"
    assert eventually(lambda: output.exists() and output.read_text().count("three steps") == 4, timeout_s=120)
    ranks = [values[3] for values in told(tmp_path).values()]
    assert all(map(is_running, ranks))
    assert slurm.run("scancel", job).returncode == 0
    assert wait_until_gone(ranks, 25) == [], "they end by SIGTERM, before SLURM would kill them"
    assert end_of(slurm, job)[0] == "CANCELLED"
