from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from sparkdl.collective import Coordinator, RendezvousClient
from sparkdl.launch.task.meeting import FailureBoard
from sparkdl.launch.wire.outcome import Failure
from sparkdl.rendezvous.channel import new_secret

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
            FailureBoard(client.prefix("tasks"), rank=rank, host="ab"[rank])
            for rank, client in enumerate(clients)
        ]
        yield coordinator, made
        for client in clients:
            client.close()


def test_every_task_learns_of_the_cause_though_a_consequence_was_posted_first() -> None:
    reasons: queue.Queue[str] = queue.Queue()
    with boards(2) as (_, (first, second)):
        first.watch(reasons.put)
        second.post(CAUSE)
        first.post(CONSEQUENCE)
        assert reasons.get(timeout=10) == "rank 1 on b failed: LookupError: none"


def test_consequence_is_posted_when_no_cause_shows_up() -> None:
    reasons: queue.Queue[str] = queue.Queue()
    with boards(2) as (_, (first, second)):
        second.watch(reasons.put)
        first.post(CONSEQUENCE)
        assert "RankLostError" in reasons.get(timeout=10)


LOST_TASK = """
import os, signal, sys
from sparkdl.collective import Address, RendezvousClient
from sparkdl.launch.task.meeting import FailureBoard
secret, address = sys.stdin.read().split(maxsplit=1)
client = RendezvousClient.connect(Address.from_bytes(address), bytes.fromhex(secret), timeout_s=10)
FailureBoard(client.prefix("tasks"), rank=1, host="b")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_task_that_is_killed_is_named() -> None:
    reasons: queue.Queue[str] = queue.Queue()
    secret = new_secret()
    with Coordinator(secret=secret, world_size=2, host="127.0.0.1") as coordinator:
        address = coordinator.address
        with RendezvousClient.connect(address, secret, timeout_s=10) as client:
            FailureBoard(client.prefix("tasks"), rank=0, host="a").watch(reasons.put)
            told = f"{secret.hex()} {address.to_bytes().decode()}"
            subprocess.run([sys.executable, "-c", LOST_TASK], input=told, text=True, check=False, timeout=30)
            assert reasons.get(timeout=10) == "rank 1 on b failed: its executor or Python worker was lost"


def test_lost_coordinator_is_a_reason_and_no_error_of_the_board() -> None:
    reasons: queue.Queue[str] = queue.Queue()
    with boards(1) as (coordinator, (board,)):
        board.watch(reasons.put)
        coordinator.close()
        assert "coordinator" in reasons.get(timeout=10)
        board.post(CAUSE)
        board.finish()


def test_rank_0_waits_until_all_have_finished() -> None:
    with boards(2) as (_, (first, second)):
        second.finish()
        first.finish()
        first.wait_until_finished(2)
