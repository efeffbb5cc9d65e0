from __future__ import annotations

import pytest

from sparkdl.collective import Address
from sparkdl.collective.current import find_own_job
from sparkdl.collective.job import RankJob
from sparkdl.collective.torchrun_variables import (
    TORCHRUN_VARIABLES,
    is_torchruns,
    torchrun_variables,
    variables_of_slurm,
)
from sparkdl.errors import LaunchError
from sparkdl.topology import Topology

JOB = RankJob(rank=2, world_size=3, coordinator=Address(("10.0.0.1", "127.0.0.1"), 4242), secret=b"s" * 32)
TOPOLOGY = Topology(rank=2, host_of_rank=(0, 1, 1))
VARIABLES = {**JOB.to_variables(), **torchrun_variables(JOB, TOPOLOGY)}


def test_torchrun_variables_describe_the_place_of_a_rank() -> None:
    variables = torchrun_variables(JOB, TOPOLOGY, restart_count=1, max_restarts=4)
    assert tuple(variables) == TORCHRUN_VARIABLES
    of_rank = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    of_group = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4242"}
    restarts = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "4"}
    assert of_rank.items() | of_group.items() | restarts.items() <= variables.items()
    alone = torchrun_variables(JOB, TOPOLOGY, is_alone=True)
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [alone[name] for name in names] == ["0", "1", "2", "3"]


def test_job_of_a_rank_is_ignored_when_torchrun_starts_ranks_inside_it() -> None:
    assert find_own_job(VARIABLES) == JOB
    for run_id in ("none", "sparkdl-7", "sparkdl:7b"):  # as --rdzv-id names it
        assert find_own_job({**VARIABLES, "TORCHELASTIC_RUN_ID": run_id}) is None


@pytest.mark.parametrize(
    ("changed", "is_named"),
    [
        ({}, True),
        ({"MASTER_ADDR": "localhost"}, True),
        ({"MASTER_ADDR": "10.0.0.2"}, False),
        ({"MASTER_PORT": "29500"}, False),
    ],
)
def test_master_address_and_port_decide_whether_a_program_meets_in_the_job(
    changed: dict[str, str], is_named: bool
) -> None:
    given = {**VARIABLES, **changed}
    assert JOB.is_at(given["MASTER_ADDR"], given["MASTER_PORT"]) is is_named


def task_of_slurm(rank: int, **others: str) -> dict[str, str]:
    hosts = [0, 0, 1, 1, 2]
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(hosts[rank]),
        "SLURM_STEP_NODELIST": "gpu[03-04],big1",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        **others,
    }


def test_variables_of_slurm_become_those_of_torchrun() -> None:
    values = variables_of_slurm(task_of_slurm(4))
    shown = {name: values[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    assert shown == {"RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert (values["GROUP_RANK"], values["GROUP_WORLD_SIZE"]) == ("2", "3")
    assert values["MASTER_ADDR"] == "gpu03"
    assert is_torchruns(values)
    assert {variables_of_slurm(task_of_slurm(rank))["MASTER_PORT"] for rank in range(5)} == {
        values["MASTER_PORT"]
    }


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n7", "n7"),
        ("a,b", "a"),
        ("rack1-[9,11-12]", "rack1-9"),
        ("x[001-128]", "x001"),
        ("r[1-2]n[3-4]", "r1n3"),
    ],
)
def test_rank_0_is_on_the_first_host_of_a_step(nodes: str, first: str) -> None:
    assert variables_of_slurm(task_of_slurm(0, SLURM_STEP_NODELIST=nodes))["MASTER_ADDR"] == first


def test_jobs_of_slurm_have_ports_of_their_own_unless_the_user_sets_one() -> None:
    ports = {variables_of_slurm(task_of_slurm(0, SLURM_JOB_ID=str(job)))["MASTER_PORT"] for job in range(50)}
    assert len(ports) == 50
    given = variables_of_slurm(task_of_slurm(0, MASTER_PORT="5", MASTER_ADDR="here"))
    assert (given["MASTER_PORT"], given["MASTER_ADDR"]) == ("5", "here")


def test_single_task_of_slurm_is_no_rank() -> None:
    assert variables_of_slurm({}) == {}
    assert variables_of_slurm(task_of_slurm(0, SLURM_STEP_NUM_TASKS="1")) == {}


def test_task_of_slurm_without_its_variables_is_an_error_that_names_them() -> None:
    task = task_of_slurm(0)
    del task["SLURM_STEP_NODELIST"]
    with pytest.raises(LaunchError, match="SLURM_STEP_NODELIST is not set"):
        variables_of_slurm(task)
