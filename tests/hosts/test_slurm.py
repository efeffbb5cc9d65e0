"""Ranks that SLURM's srun starts on several hosts, by ``sparkdl run``; and ports of a limited range."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.hosts.network import Network, hosts_with_ranks
from tests.launchers import environment, told, write_script

SCRIPT = """
import os
import torch
import torch.distributed as dist
import sparkdl.torch

dist.init_process_group("sparkdl")
total = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(total)
with open("/proc/net/tcp") as lines:
    ports = {int(line.split()[1].rpartition(":")[2], 16) for line in list(lines)[1:]}
tell(dist.get_rank(), [total.tolist(), os.environ["LOCAL_RANK"], os.environ["OMP_NUM_THREADS"], sorted(ports)])
dist.barrier()
"""


def run_tasks(network: Network, script: Path) -> list[subprocess.CompletedProcess[str]]:
    """Start ``sparkdl run`` once per task with the variables that srun would set."""
    hosts = network.host_of_rank
    counts = [hosts.count(host) for host in sorted(set(hosts))]
    processes = []
    for rank, host in enumerate(hosts):
        variables = {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(len(hosts)),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank - hosts.index(host)),
            "SLURM_NODEID": str(host),
            "SLURM_STEP_NODELIST": f"10.77.0.[1-{len(counts)}]",
            "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts)),
        }
        command = [*network.command(rank), sys.executable, "-m", "sparkdl.cli", "run", "--", str(script)]
        processes.append(
            subprocess.Popen(
                command,
                env=environment(**variables),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    done = []
    for process in processes:
        out, err = process.communicate(timeout=200)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


def test_tasks_of_srun_on_two_hosts_are_ranks_of_one_job(tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT)
    with hosts_with_ranks(2, 1) as network:
        for task in run_tasks(network, script):
            assert task.returncode == 0, task.stderr
    assert {rank: seen[0] for rank, seen in told(tmp_path).items()} == dict.fromkeys(range(3), [6.0] * 3)
    assert [seen[1] for _, seen in sorted(told(tmp_path).items())] == ["0", "1", "0"]


def test_ports_of_ranks_are_from_the_range_of_the_system(tmp_path: Path) -> None:
    """The templates for Kubernetes open such a range between pods."""
    script = write_script(tmp_path, SCRIPT)
    with hosts_with_ranks(1, 1) as network:
        for rank in range(2):
            setting = ["sh", "-c", "echo 40000 40999 > /proc/sys/net/ipv4/ip_local_port_range"]
            subprocess.run([*network.command(rank), *setting], check=True, timeout=60)
        for task in run_tasks(network, script):
            assert task.returncode == 0, task.stderr
    master = 10_000 + 4711
    for seen in told(tmp_path).values():
        assert seen[3]
        assert [port for port in seen[3] if port != master and not 40_000 <= port < 41_000] == []
