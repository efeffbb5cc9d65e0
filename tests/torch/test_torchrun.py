"""Ranks that ``torchrun`` starts find each other, beside other users of torch's store, and end together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sparkdl.torch
from sparkdl.errors import LaunchError
from tests.launchers import TOOLS, run, told, write_script

pytest.importorskip("torch", reason="torch is not installed")

REDUCE = """
import torch
import torch.distributed as dist
import sparkdl.torch
sparkdl.torch.init_process_group()
tensor = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
tell(dist.get_rank(), tensor.tolist())
dist.destroy_process_group()
"""

BESIDE_GLOO = """
import torch
import torch.distributed as dist
import sparkdl.torch
from sparkdl.collective import current_communicator
dist.init_process_group("gloo")
communicator = current_communicator()
gloo, ours = torch.ones(2), torch.ones(2)
dist.all_reduce(gloo)
communicator.allreduce(ours)
tell(communicator.rank, [gloo.tolist(), ours.tolist(), communicator.rank == dist.get_rank()])
dist.destroy_process_group()
"""

FAIL = """
import numpy
import sparkdl.torch
from sparkdl.collective import current_communicator
communicator = current_communicator()
if communicator.rank == 1:
    raise ValueError("bad batch")
communicator.allreduce(numpy.ones(3))
"""


def torchrun(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    script = write_script(folder, source)
    return run([TOOLS / "torchrun", "--nproc-per-node", "2", script], cwd=folder, variables={})


def test_ranks_find_each_other(tmp_path: Path) -> None:
    done = torchrun(tmp_path, REDUCE)
    assert done.returncode == 0, done.stderr
    assert told(tmp_path) == {0: [3.0] * 3, 1: [3.0] * 3}


@pytest.mark.slow  # eight processes import torch: ranks and their launchers
def test_store_serves_another_backend_too(tmp_path: Path) -> None:
    done = torchrun(tmp_path, BESIDE_GLOO)
    assert done.returncode == 0, done.stderr
    assert told(tmp_path) == {rank: [[2.0, 2.0], [2.0, 2.0], True] for rank in (0, 1)}


def test_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    done = torchrun(tmp_path, FAIL)
    assert done.returncode == 1
    assert "ValueError: bad batch" in done.stderr
    assert "rank 1 aborted: rank 1 failed: ValueError: bad batch" in done.stderr


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT"),
        ({"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "localhost"}, "RANK, WORLD_SIZE, MASTER_PORT"),
    ],
)
def test_variables_that_are_missing_are_named(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], missing: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=f"set, but not {missing}\\."):
        sparkdl.torch.init_process_group()


def test_error_under_torchrun_says_to_import_sparkdl_torch(tmp_path: Path) -> None:
    source = "from sparkdl.collective import current_communicator\ncurrent_communicator()"
    done = run(
        [sys.executable, write_script(tmp_path, source)], cwd=tmp_path, variables={"TORCHELASTIC_RUN_ID": "x"}
    )
    assert done.returncode == 1
    assert "import sparkdl.torch" in done.stderr


def test_error_outside_a_rank_says_how_to_start_ranks() -> None:
    with pytest.raises(LaunchError, match="init_process_group found no communicator") as caught:
        sparkdl.torch.init_process_group()
    assert "sparkdl run" in str(caught.value)
