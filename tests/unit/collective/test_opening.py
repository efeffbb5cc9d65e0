from __future__ import annotations

import math

import pytest

from sparkdl.collective import Address, Coordinator, RendezvousClient, new_secret, open_communicator
from sparkdl.collective.job import TIMEOUT_S, RankJob
from sparkdl.errors import LaunchError, ParamError

SECRET = new_secret()


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_invalid_timeout_is_refused_before_any_rank_is_contacted(timeout_s: float) -> None:
    with (
        Coordinator(secret=SECRET, world_size=2, host="127.0.0.1") as coordinator,
        RendezvousClient.connect(coordinator.address, SECRET, 5.0) as client,
    ):
        with pytest.raises(ParamError, match="timeout_s must be .* got"):
            open_communicator(rendezvous=client, rank=0, world_size=2, secret=SECRET, timeout_s=timeout_s)
        assert client.num_keys() == 0


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_invalid_timeout_variable_is_named(text: str) -> None:
    job = RankJob(rank=0, world_size=1, coordinator=Address(hosts=("127.0.0.1",), port=1), secret=SECRET)
    with pytest.raises(LaunchError, match=TIMEOUT_S):
        job.with_choices_of({TIMEOUT_S: text})
    assert job.with_choices_of({TIMEOUT_S: ""}).timeout_s == job.timeout_s
