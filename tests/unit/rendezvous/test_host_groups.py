from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.collective import Coordinator, RendezvousClient, new_secret
from sparkdl.rendezvous.hosts import find_hosts, group_by_sight

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = new_secret()


@pytest.fixture
def clients() -> Iterator[list[RendezvousClient]]:
    with Coordinator(secret=SECRET, world_size=3) as coordinator:
        connected = [RendezvousClient.connect(coordinator.address, SECRET, 10.0) for _ in range(3)]
        yield connected
        for client in connected:
            client.close()


def test_ranks_of_this_machine_share_a_host(clients: list[RendezvousClient]) -> None:
    with ThreadPoolExecutor() as pool:
        answers = [
            pool.submit(find_hosts, client, rank=rank, world_size=3, timeout_s=10.0)
            for rank, client in enumerate(clients)
        ]
    assert [answer.result() for answer in answers] == [(0, 0, 0)] * 3


@pytest.mark.parametrize(
    ("seen", "hosts"),
    [
        ([{0, 1}, {0, 1}, {2}], (0, 0, 1)),
        ([{0, 2}, {1, 3}, {0, 2}, {1, 3}], (0, 1, 0, 1)),
        ([{0, 1}, {1}], (0, 1)),  # sight that is not mutual does not count
        ([{0, 1, 2}, {0, 1}, {0, 2}], (0, 0, 1)),  # nor does sight through a third rank
        ([{0}, {1}, {2}], (0, 1, 2)),
    ],
)
def test_ranks_are_grouped_when_all_of_a_group_see_each_other(
    seen: list[set[int]], hosts: tuple[int, ...]
) -> None:
    assert group_by_sight(seen) == hosts


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_hosts_are_derived_from_what_the_ranks_see(true_hosts: list[int]) -> None:
    seen = [
        {other for other, host in enumerate(true_hosts) if host == true_hosts[rank]}
        for rank in range(len(true_hosts))
    ]
    found = group_by_sight(seen)
    pairs = zip(found, true_hosts, strict=True)
    assert len(set(pairs)) == len(set(found)) == len(set(true_hosts))
