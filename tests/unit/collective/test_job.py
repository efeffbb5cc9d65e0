"""When a rank leaves its job, and for which ranks the rank with the coordinator waits."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from sparkdl.collective import Coordinator, RendezvousClient, StallCheck, new_secret, open_communicator
from sparkdl.collective.job import _DEPARTURES, Job, _Membership

SECRET = new_secret()


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[_Membership]]:
    """Two ranks in this process; the first one runs the coordinator."""
    monkeypatch.delattr(sys, "last_value", raising=False)  # set by pytest after failed tests
    coordinator = Coordinator(secret=SECRET, world_size=2, host="127.0.0.1")
    clients = [RendezvousClient.connect(coordinator.address, SECRET, 10.0) for _ in range(2)]

    def join(rank: int) -> _Membership:
        clients[rank].post_if_lost(_DEPARTURES, str(rank).encode())
        job = Job(rank=rank, world_size=2, coordinator=coordinator.address, secret=SECRET, timeout_s=20.0)
        membership = _Membership(job, clients[rank], coordinator if rank == 0 else None)
        membership.communicator = open_communicator(
            rendezvous=clients[rank],
            rank=rank,
            world_size=2,
            secret=SECRET,
            transport="tcp",
            timeout_s=20.0,
            stall_check=StallCheck(warn_after_s=None),  # starts no thread that would outlive the test
        )
        return membership

    with ThreadPoolExecutor() as pool:
        yield list(pool.map(join, range(2)))
    for client in clients:
        client.close()
    coordinator.close()


def test_coordinator_outlives_the_last_rank(members: list[_Membership]) -> None:
    first, last = members
    with ThreadPoolExecutor() as pool:
        leaving = pool.submit(first.leave)
        last.client.get(f"{_DEPARTURES}/1", 10.0)
        assert last.client.add("still served", 1) == 1
        assert not leaving.done()
        last.leave()
        leaving.result(10.0)


def test_coordinator_that_leaves_first_names_the_rank_that_has_not_left(
    members: list[_Membership], caplog: pytest.LogCaptureFixture
) -> None:
    first, last = members
    first._job = replace(first._job, timeout_s=0.2)
    with caplog.at_level(logging.WARNING):
        first.leave()
    (record,) = caplog.records
    assert "rank 1 had not left the job" in record.getMessage()
    last.leave()


def test_rank_that_died_is_not_waited_for(
    members: list[_Membership], caplog: pytest.LogCaptureFixture
) -> None:
    first, last = members
    last.client._sock.shutdown(2)  # as if the process had died
    first.leave()
    assert not [record for record in caplog.records if "had not left" in record.getMessage()]
    last.leave()
