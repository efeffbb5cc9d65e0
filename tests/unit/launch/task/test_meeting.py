from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from sparkdl.collective import Address, Coordinator, RendezvousClient
from sparkdl.errors import LaunchError
from sparkdl.launch.task import meeting as meeting_module
from sparkdl.launch.task.meeting import FailureBoard, Meeting, Peer
from sparkdl.launch.wire import channel as driver_channel
from sparkdl.launch.wire.channel import DriverChannel, DriverLink
from sparkdl.launch.wire.messages import MessageConnection
from sparkdl.launch.wire.outcome import Failure, StopReason
from sparkdl.rendezvous.dialing import connect_authenticated
from sparkdl.rendezvous.handshake import new_secret
from tests.collective.eventually import eventually

PEERS = [
    Peer(host=f"host-{rank}", conflicts=[], mark="", coordinator="here" * (rank == 0)) for rank in range(2)
]


class SlowSpark:
    """A barrier that answers when the test allows it."""

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


SECRET = new_secret()


@pytest.fixture
def spark() -> Any:
    return SlowSpark()


@pytest.fixture
def channel() -> Iterator[DriverChannel]:
    with DriverChannel(SECRET, 2) as channel:
        yield channel


@pytest.fixture
def unreachable() -> Address:
    """The address of a driver that is gone."""
    with DriverChannel(SECRET, 2) as gone:
        return gone.address


@contextmanager
def task(rank: int, driver: Address, spark: Any) -> Iterator[Meeting]:
    with (
        DriverLink(driver, SECRET, rank=rank, host="ab"[rank]) as link,
        Meeting(spark.allGather, link, PEERS[rank]) as meeting,
    ):
        yield meeting


def test_tasks_that_reach_the_driver_meet_without_spark(spark: Any, channel: DriverChannel) -> None:
    with task(1, channel.address, spark) as of_other, task(0, channel.address, spark) as meeting:
        assert meeting.peers(30) == of_other.peers(30) == PEERS
    assert spark.told == [], "a task that Spark kills in its allGather takes the executor along"


def test_tasks_meet_by_spark_if_one_cannot_reach_the_driver(
    spark: Any, channel: DriverChannel, unreachable: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_channel, "MEETING_TIMEOUT_S", 0.1)
    with task(1, unreachable, spark) as of_other, task(0, channel.address, spark) as meeting:
        spark.answers.set()
        assert meeting.peers(30) == of_other.peers(30) == PEERS
        assert sorted(json.loads(text)["host"] for text in spark.told) == ["host-0", "host-1"]
    assert not any(thread.name == "sparkdl-meeting" for thread in threading.enumerate())


def test_late_task_meets_by_spark_as_the_others_do(
    spark: Any, channel: DriverChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_channel, "MEETING_TIMEOUT_S", 0.1)
    spark.answers.set()
    with task(0, channel.address, spark) as meeting:
        assert eventually(lambda: len(spark.told) == 1, timeout_s=30)
        with task(1, channel.address, spark) as of_late:
            assert meeting.peers(30) == of_late.peers(30) == PEERS


def test_exception_of_a_cancelled_stage_is_raised(unreachable: Address) -> None:
    spark = SlowSpark(num_tasks=1)
    spark.error = RuntimeError("the stage was cancelled")
    spark.answers.set()
    with task(0, unreachable, spark) as meeting, pytest.raises(RuntimeError, match="cancelled"):
        meeting.peers(30)


@pytest.mark.parametrize("is_gone", [False, True])
def test_meeting_fails_if_the_driver_cancels_or_ends(
    spark: Any, channel: DriverChannel, is_gone: bool
) -> None:
    with (
        DriverLink(channel.address, SECRET, rank=0, host="a") as link,
        pytest.raises(
            LaunchError, match="did not meet: the driver is gone" if is_gone else "did not meet: enough"
        ),
        Meeting(spark.allGather, link, PEERS[0]) as meeting,
    ):
        link.watch(meeting.abandon)
        if is_gone:
            channel.__exit__(None, None, None)
        else:
            channel.cancel(StopReason("enough"))
        meeting.peers(30)
    spark.answers.set()


@pytest.mark.parametrize("first_is_gone", [False, True])
def test_tasks_of_several_attempts_meet_by_spark(channel: DriverChannel, first_is_gone: bool) -> None:
    heard: list[Any] = []
    with ExitStack() as links:

        def meet(rank: int) -> DriverLink:
            link = links.enter_context(DriverLink(channel.address, SECRET, rank=rank, host="here"))
            link.meet({"rank": rank}, heard.append)
            # A thread serves each connection: the line shows that earlier messages were processed.
            link.line("said")
            # The end of the last connection, here of a first attempt, wakes who waits without a line.
            assert eventually(lambda: channel.next_message(1) is not None)
            return link

        if first_is_gone:
            sock = connect_authenticated(
                channel.address, SECRET, purpose=driver_channel.PURPOSE, timeout_s=10
            )
            first = MessageConnection(sock)
            first.send({"kind": "hello", "rank": 0, "host": "here"})
            first.send({"kind": "meet", "peer": {"rank": 0}})
            first.close()
            assert eventually(lambda: bool(channel.failures))
        else:
            meet(0)
            meet(0)
        last = meet(1)
        last.line("and is heard on")
        assert channel.next_message(10).line == "and is heard on"
        assert eventually(lambda: None in heard, timeout_s=30)
    assert set(heard) == {None}, "they are told to meet by Spark"


def test_meeting_has_a_deadline(spark: Any, channel: DriverChannel) -> None:
    with (
        pytest.raises(LaunchError, match=r"within 0\.05 s: "),
        task(0, channel.address, spark) as meeting,
    ):
        meeting.peers(0.05)


class Barrier:
    """Like Spark's barrier for some tasks: each call returns when all tasks have made it."""

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


def test_tasks_that_have_met_can_meet_again(channel: DriverChannel) -> None:
    spark = Barrier(2)

    def meet_twice(rank: int) -> list[Peer]:
        with task(rank, channel.address, spark) as meeting:
            assert meeting.peers(30) == PEERS
            return meeting.meet_again(replace(PEERS[rank], coordinator="there" * (rank == 0)))

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(meet_twice, range(2))
    assert first == second == [replace(PEERS[0], coordinator="there"), PEERS[1]]


CAUSE = Failure(rank=1, host="b", error="LookupError: none", traceback="")
CONSEQUENCE = Failure(rank=0, host="a", error="RankLostError: rank 1", traceback="", is_consequence=True)


@contextmanager
def boards(num_ranks: int) -> Iterator[tuple[Coordinator, list[FailureBoard]]]:
    secret = new_secret()
    with Coordinator(secret=secret, world_size=num_ranks, host="127.0.0.1") as coordinator:
        clients = [
            RendezvousClient.connect(coordinator.address, secret, timeout_s=10) for _ in range(num_ranks)
        ]
        made = [
            FailureBoard(client.view("tasks"), rank=rank, host="ab"[rank])
            for rank, client in enumerate(clients)
        ]
        yield coordinator, made
        for client in clients:
            client.close()


def test_every_task_gets_the_cause_even_if_a_consequence_was_posted_first() -> None:
    reasons: queue.Queue[str] = queue.Queue()
    with boards(2) as (_, (first, second)):
        first.watch(reasons.put)
        second.post(CAUSE)
        first.post(CONSEQUENCE)
        assert reasons.get(timeout=60) == "rank 1 on b failed: LookupError: none"


def test_consequence_is_posted_if_there_is_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_module, "CAUSE_TIMEOUT_S", 0.2)
    reasons: queue.Queue[str] = queue.Queue()
    with boards(2) as (_, (first, second)):
        second.watch(reasons.put)
        first.post(CONSEQUENCE)
        assert "RankLostError" in reasons.get(timeout=60)


def test_consequence_in_a_cancelled_job_is_posted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_module, "CAUSE_TIMEOUT_S", 600.0)  # longer than a test may take
    reasons: queue.Queue[str] = queue.Queue()
    with boards(2) as (_, (first, second)):
        second.watch(reasons.put)
        first.post(CONSEQUENCE, is_cancelled=True)
        assert "RankLostError" in reasons.get(timeout=60)


def test_consequence_of_a_job_with_one_task_is_posted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_module, "CAUSE_TIMEOUT_S", 600.0)  # longer than a test may take
    secret, reasons = new_secret(), queue.Queue[str]()
    with (
        Coordinator(secret=secret, world_size=1, host="127.0.0.1") as coordinator,
        RendezvousClient.connect(coordinator.address, secret, timeout_s=10) as client,
    ):
        board = FailureBoard(client.view("tasks"), rank=0, host="a", is_alone=True)
        board.watch(reasons.put)
        board.post(CONSEQUENCE)
        assert "RankLostError" in str(reasons.get(timeout=60))


LOST_TASK = """
import os, signal, sys
from sparkdl.collective import Address, RendezvousClient
from sparkdl.launch.task.meeting import FailureBoard
secret, address = sys.stdin.read().split(maxsplit=1)
client = RendezvousClient.connect(Address.from_bytes(address), bytes.fromhex(secret), timeout_s=10)
FailureBoard(client.view("tasks"), rank=1, host="b")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_task_that_is_killed_is_named() -> None:
    reasons: queue.Queue[str] = queue.Queue()
    secret = new_secret()
    with Coordinator(secret=secret, world_size=2, host="127.0.0.1") as coordinator:
        address = coordinator.address
        with RendezvousClient.connect(address, secret, timeout_s=10) as client:
            FailureBoard(client.view("tasks"), rank=0, host="a").watch(reasons.put)
            told = f"{secret.hex()} {address.to_bytes().decode()}"
            subprocess.run([sys.executable, "-c", LOST_TASK], input=told, text=True, check=False, timeout=300)
            reason = reasons.get(timeout=60)
            assert reason.startswith("rank 1 on b failed: ")
            assert reason.endswith(" was lost")


def test_lost_coordinator_is_reported_as_a_reason_and_not_raised_by_the_board() -> None:
    reasons: queue.Queue[str] = queue.Queue()
    with boards(1) as (coordinator, (board,)):
        board.watch(reasons.put)
        coordinator.close()
        assert "coordinator" in reasons.get(timeout=60)
        board.post(CAUSE)
        board.finish()


def test_rank_0_waits_until_all_have_finished() -> None:
    with boards(2) as (_, (first, second)):
        second.finish()
        first.finish()
        first.wait_until_finished(2)
