"""When a rank leaves its job, and for which ranks the rank with the coordinator waits."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from sparkdl.collective import Coordinator, RendezvousClient, connect_authenticated, new_secret
from sparkdl.collective import job as job_module
from sparkdl.collective.job import RankJob, enter_job, join_job
from sparkdl.rendezvous.coordinator import PURPOSE

SECRET = new_secret()
DEPARTURES = "job/departures"


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with Coordinator(secret=SECRET, world_size=2, host="127.0.0.1") as coordinator:
        yield coordinator


@pytest.fixture
def leaves(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """The functions that this process would call at its end to leave the ranks that it has entered."""
    monkeypatch.delattr(sys, "last_value", raising=False)  # set by pytest after failed tests
    found: list[Callable[[], None]] = []
    monkeypatch.setattr(job_module, "atexit", SimpleNamespace(register=found.append))
    return found


def job_of(rank: int, coordinator: Coordinator, timeout_s: float = 20.0) -> RankJob:
    return RankJob(
        rank=rank, world_size=2, coordinator=coordinator.address, secret=SECRET, timeout_s=timeout_s
    )


def test_coordinator_outlives_the_last_rank(
    coordinator: Coordinator, leaves: list[Callable[[], None]]
) -> None:
    jobs = [job_of(rank, coordinator) for rank in range(2)]
    enter_job(jobs[0], coordinator)
    client = enter_job(jobs[1]).client
    with ThreadPoolExecutor() as pool:
        list(pool.map(join_job, jobs))  # their communicator is closed as they leave
        leaving = pool.submit(leaves[0])
        client.get(f"{DEPARTURES}/1", 10.0)
        assert client.add("still served", 1) == 1
        assert not leaving.done()
        leaves[1]()
        leaving.result(10.0)


def test_coordinator_that_leaves_first_names_the_rank_that_has_not_left(
    coordinator: Coordinator, leaves: list[Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    enter_job(job_of(0, coordinator, timeout_s=2.0), coordinator)
    enter_job(job_of(1, coordinator))
    with caplog.at_level(logging.WARNING):
        leaves[0]()
    (record,) = caplog.records
    assert "rank 1 had not left the job" in record.getMessage()
    leaves[1]()


def test_rank_that_died_is_not_waited_for(
    coordinator: Coordinator, leaves: list[Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    enter_job(job_of(0, coordinator), coordinator)
    sock = connect_authenticated(coordinator.address, SECRET, purpose=PURPOSE, timeout_s=10.0)
    with RendezvousClient(sock, coordinator.address) as last:
        last.post_if_lost(DEPARTURES, b"1")
        sock.shutdown(socket.SHUT_RDWR)  # as if the process had died
        leaves[0]()
    assert not [record for record in caplog.records if "had not left" in record.getMessage()]
