"""The address on which the coordinator of a launch listens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.launch.task.barrier_task import hosts_for_tasks, spark_task
from sparkdl.rendezvous.addresses import reachable_hosts


def context_of(rank: int, addresses: list[str]) -> Any:
    infos = [SimpleNamespace(address=address) for address in addresses]
    return SimpleNamespace(
        partitionId=lambda: rank, getTaskInfos=lambda: infos, resources=dict, cpus=lambda: 1, allGather=None
    )


@pytest.mark.parametrize(
    "addresses",
    [
        ["node-1:40001", "node-1:40002"],
        ["10.0.0.1:40001"],
        ["localhost:40001", "127.0.0.1:40002"],
        ["[fd00::1]:40001", "[fd00::1]:40002"],
    ],
)
def test_coordinator_of_tasks_on_one_host_listens_on_loopback(addresses: list[str]) -> None:
    assert hosts_for_tasks(spark_task(context_of(0, addresses)).hosts) == ["127.0.0.1"]


def test_coordinator_of_several_hosts_listens_where_spark_knows_its_executor() -> None:
    own = reachable_hosts()[0]
    text = f"[{own}]" if ":" in own else own
    hosts = spark_task(context_of(1, ["198.51.100.7:1", f"{text}:2"])).hosts
    assert hosts == [own, "198.51.100.7"]
    assert hosts_for_tasks(hosts) == (own,)


def test_coordinator_behind_a_foreign_spark_address_logs_where_it_listens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hosts = spark_task(context_of(0, ["198.51.100.7:1", "198.51.100.8:1"])).hosts
    chosen = hosts_for_tasks(hosts)
    assert chosen == reachable_hosts()
    assert f"so this process listens on {', '.join(chosen)}" in caplog.text
    assert "SPARKDL_LISTEN" in caplog.text
