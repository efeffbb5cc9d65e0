from __future__ import annotations

import pytest

from sparkdl.collective import Address
from sparkdl.collective.current import find_own_job
from sparkdl.collective.job import RankJob
from sparkdl.collective.torchrun_variables import TORCHRUN_VARIABLES, torchrun_variables
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
