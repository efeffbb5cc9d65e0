"""How tasks learn of each other: by the driver, and by Spark where that is out of reach of one of them."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.errors import LaunchError
from sparkdl.launch.task.barrier_task import hosts_for_tasks, task_hosts
from sparkdl.launch.task.meeting import Meeting, Peer
from sparkdl.launch.wire import channel as driver_channel
from sparkdl.launch.wire.channel import DriverChannel, DriverLink
from sparkdl.launch.wire.outcome import StopReason
from sparkdl.rendezvous.addresses import reachable_hosts
from sparkdl.rendezvous.channel import new_secret
from tests.collective.eventually import eventually

PEERS = [
    Peer(host=f"host-{rank}", conflicts=[], mark="", coordinator="here" * (rank == 0)) for rank in range(2)
]


class SlowSpark:
    """A barrier whose answer is there when the test says so."""

    def __init__(self, num_tasks: int = 2) -> None:
        self.answers = threading.Event()
        self.all_came = threading.Barrier(num_tasks)
        self.told: list[str] = []
        self.error: Exception | None = None

    def allGather(self, message: str) -> list[str]:
        self.told.append(message)
        self.all_came.wait(30)
        assert self.answers.wait(30)
        if self.error is not None:
            raise self.error
        return sorted(self.told)


@pytest.fixture
def spark() -> Any:
    return SlowSpark()


def test_tasks_that_reach_the_driver_meet_without_spark(spark: Any) -> None:
    secret = new_secret()
    with (
        DriverChannel(secret, 2) as channel,
        DriverLink(channel.address, secret, rank=1, host="b") as other,
        DriverLink(channel.address, secret, rank=0, host="a") as link,
        Meeting(spark, other, PEERS[1]) as of_other,
        Meeting(spark, link, PEERS[0]) as meeting,
    ):
        assert meeting.peers(30) == of_other.peers(30) == PEERS
    assert spark.told == [], "a task that Spark kills in its allGather takes the executor along"


def test_a_task_out_of_the_drivers_reach_has_all_of_them_meet_by_spark_to_its_end(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_channel, "MEETING_PATIENCE_S", 0.1)
    secret = new_secret()
    with DriverChannel(secret, 2) as gone:
        unreachable = gone.address
    with (
        DriverChannel(secret, 2) as channel,
        DriverLink(unreachable, secret, rank=1, host="b") as other,
        DriverLink(channel.address, secret, rank=0, host="a") as link,
        Meeting(spark, other, PEERS[1]) as of_other,
        Meeting(spark, link, PEERS[0]) as meeting,
    ):
        spark.answers.set()
        assert meeting.peers(30) == of_other.peers(30) == PEERS
        assert sorted(json.loads(text)["host"] for text in spark.told) == ["host-0", "host-1"]
    assert not any(thread.name == "sparkdl-meeting" for thread in threading.enumerate())


def test_a_task_that_comes_late_meets_by_spark_as_the_others_do(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_channel, "MEETING_PATIENCE_S", 0.1)
    secret = new_secret()
    spark.answers.set()
    with (
        DriverChannel(secret, 2) as channel,
        DriverLink(channel.address, secret, rank=0, host="a") as link,
        Meeting(spark, link, PEERS[0]) as meeting,
    ):
        assert eventually(lambda: len(spark.told) == 1, timeout_s=30)
        with (
            DriverLink(channel.address, secret, rank=1, host="b") as late,
            Meeting(spark, late, PEERS[1]) as of_late,
        ):
            assert meeting.peers(30) == of_late.peers(30) == PEERS


def test_what_spark_says_of_a_cancelled_stage_is_raised() -> None:
    secret, spark = new_secret(), SlowSpark(num_tasks=1)
    spark.error = RuntimeError("the stage was cancelled")
    with DriverChannel(secret, 2) as gone:
        unreachable = gone.address
    with (
        DriverLink(unreachable, secret, rank=0, host="a") as link,
        Meeting(spark, link, PEERS[0]) as meeting,  # type: ignore[arg-type]
    ):
        spark.answers.set()
        with pytest.raises(RuntimeError, match="cancelled"):
            meeting.peers(30)


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_driver_that_cancels_or_goes_while_tasks_meet_is_heard(spark: Any, is_gone: bool) -> None:
    secret = new_secret()
    with (
        DriverChannel(secret, 2) as channel,
        DriverLink(channel.address, secret, rank=0, host="a") as link,
        pytest.raises(
            LaunchError, match="did not meet: the driver is gone" if is_gone else "did not meet: enough"
        ),
        Meeting(spark, link, PEERS[0]) as meeting,
    ):
        link.watch(meeting.abandon)
        if is_gone:
            channel.__exit__(None, None, None)
        else:
            channel.cancel(StopReason("enough"))
        meeting.peers(30)
    spark.answers.set()


@pytest.mark.parametrize("first_is_gone", [False, True])
def test_tasks_of_several_attempts_are_left_to_spark(first_is_gone: bool) -> None:
    secret = new_secret()
    heard: list[Any] = []
    with DriverChannel(secret, 2) as channel, ExitStack() as links:

        def meet(rank: int) -> DriverLink:
            link = links.enter_context(DriverLink(channel.address, secret, rank=rank, host="here"))
            link.meet({"rank": rank}, heard.append)
            # Each connection is served by a thread of its own: a line says that what came before it has been taken.
            link.line("said")
            assert channel.next_message(10) is not None
            return link

        first = meet(0)
        if first_is_gone:
            assert first._connection is not None
            first._connection.close()
            assert eventually(lambda: bool(channel.failures))
        else:
            meet(0)
        last = meet(1)
        last.line("and is heard on")
        message = channel.next_message(10)
        assert message is not None
        assert message.line == "and is heard on"
        assert eventually(lambda: None in heard, timeout_s=30)
    assert heard
    assert set(heard) == {None}, "they are told to meet by Spark"


def test_tasks_wait_for_one_that_does_not_come_only_so_long(spark: Any) -> None:
    secret = new_secret()
    with (
        pytest.raises(
            LaunchError, match="did not meet within 0.05 s: one of them does not come to its start"
        ),
        DriverChannel(secret, 2) as channel,
        DriverLink(channel.address, secret, rank=0, host="a") as link,
        Meeting(spark, link, PEERS[0]) as meeting,
    ):
        meeting.peers(0.05)


class Barrier:
    """What Spark's barrier is to some tasks: each meeting ends when all are there."""

    def __init__(self, num_tasks: int) -> None:
        self._everybody = threading.Barrier(num_tasks)
        self._told: list[str] = []
        self._answer: list[str] = []

    def allGather(self, message: str) -> list[str]:
        self._told.append(message)
        if self._everybody.wait(30) == 0:
            self._answer, self._told = sorted(self._told), []
        self._everybody.wait(30)
        return self._answer


def test_tasks_that_have_met_can_meet_again() -> None:
    secret, spark = new_secret(), Barrier(2)
    with DriverChannel(secret, 2) as channel, ThreadPoolExecutor() as pool:

        def meet_twice(rank: int) -> list[Peer]:
            context: Any = spark
            with (
                DriverLink(channel.address, secret, rank=rank, host="a") as link,
                Meeting(context, link, PEERS[rank]) as meeting,
            ):
                assert meeting.peers(30) == PEERS
                return meeting.meet_again(replace(PEERS[rank], coordinator="there" * (rank == 0)))

        first, second = pool.map(meet_twice, range(2))
    assert first == second == [replace(PEERS[0], coordinator="there"), PEERS[1]]


def context_of(rank: int, addresses: list[str]) -> Any:
    infos = [SimpleNamespace(address=address) for address in addresses]
    return SimpleNamespace(partitionId=lambda: rank, getTaskInfos=lambda: infos)


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
    assert hosts_for_tasks(task_hosts(context_of(0, addresses))) == ["127.0.0.1"]


def test_coordinator_of_several_hosts_listens_where_spark_knows_its_executor() -> None:
    own = reachable_hosts()[0]
    text = f"[{own}]" if ":" in own else own
    hosts = task_hosts(context_of(1, ["198.51.100.7:1", f"{text}:2"]))
    assert hosts == [own, "198.51.100.7"]
    assert hosts_for_tasks(hosts) == (own,)


def test_coordinator_that_spark_knows_by_anothers_address_says_where_it_listens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hosts = task_hosts(context_of(0, ["198.51.100.7:1", "198.51.100.8:1"]))
    chosen = hosts_for_tasks(hosts)
    assert chosen == reachable_hosts()
    assert f"the other ranks are told {', '.join(chosen)}" in caplog.text
    assert "SPARKDL_LISTEN" in caplog.text
