from __future__ import annotations

import socket
import threading

import pytest

from sparkdl.collective.telemetry.stalls import Wait
from sparkdl.errors import AuthenticationError
from sparkdl.launch.wire.channel import MAX_WAITING_MESSAGES, PURPOSE, DriverChannel, DriverLink
from sparkdl.launch.wire.messages import MessageConnection
from sparkdl.launch.wire.outcome import RankHealth, StopReason
from sparkdl.rendezvous.dialing import connect_authenticated
from sparkdl.rendezvous.handshake import new_secret
from tests.collective.eventually import eventually


def test_lines_and_events_arrive_in_order() -> None:
    secret = new_secret()
    with DriverChannel(secret, 2) as channel:
        with DriverLink(channel.address, secret, rank=1, host="here") as link:
            link.started()
            link.line("one")
            link.event({"loss": 0.5})
        first, second = channel.next_message(10), channel.next_message(10)
        channel.wait_until_disconnected(10)
        assert first is not None
        assert second is not None
        assert (first.rank, first.line) == (1, "one")
        assert second.event == {"loss": 0.5}
        assert channel.started == {1}
        assert channel.failures == []


def test_task_that_disconnects_without_goodbye_is_a_failure() -> None:
    secret = new_secret()
    with DriverChannel(secret, 2) as channel:
        sock = connect_authenticated(channel.address, secret, purpose=PURPOSE, timeout_s=10)
        MessageConnection(sock).send({"kind": "hello", "rank": 3, "host": "far"})
        sock.close()
        assert eventually(lambda: bool(channel.failures))
        (failure,) = channel.failures
    assert (failure.rank, failure.host) == (3, "far")
    assert "lost" in failure.error


def test_cancel_reaches_connected_and_later_tasks() -> None:
    secret = new_secret()
    reasons: list[str] = []
    both = threading.Semaphore(0)

    def note(reason: str) -> None:
        reasons.append(reason)
        both.release()

    with DriverChannel(secret, 2) as channel, DriverLink(channel.address, secret, rank=0, host="a") as early:
        early.watch(note)
        channel.cancel(StopReason("enough"))
        with DriverLink(channel.address, secret, rank=1, host="b") as late:
            late.watch(note)
            assert both.acquire(timeout=60)
            assert both.acquire(timeout=60)
    assert reasons == ["enough", "enough"]


def test_task_that_connects_after_cancel_knows_so_at_once() -> None:
    secret = new_secret()
    with DriverChannel(secret, 1) as channel:
        channel.cancel(StopReason("enough"))
        for _ in range(50):
            reasons: list[str] = []
            with DriverLink(channel.address, secret, rank=0, host="a") as late:
                late.watch(reasons.append)
                assert reasons == ["enough"], "at once, from no other thread"


def test_task_without_the_secret_is_refused() -> None:
    with DriverChannel(new_secret(), 2) as channel, pytest.raises(AuthenticationError):
        connect_authenticated(channel.address, new_secret(), purpose=PURPOSE, timeout_s=10)


def test_lines_are_kept_when_the_driver_is_out_of_reach() -> None:
    secret = new_secret()
    with DriverChannel(secret, 2) as channel:
        address = channel.address
    with DriverLink(address, secret, rank=0, host="a") as link:
        link.line("kept")
        link.unsent.seek(0)
        assert link.unsent.read() == b"kept\n"


def test_message_larger_than_allowed_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((1 << 31).to_bytes(4, "big"))
        assert MessageConnection(ours).receive() is None


def test_health_arrives_with_its_number_and_is_dropped_with_the_task() -> None:
    secret = new_secret()
    health = RankHealth(silent_s=1.5, waits=(Wait("world", (0, 1), "barrier", 2.0, 60.0),))
    with DriverChannel(secret, 2) as channel:
        with DriverLink(channel.address, secret, rank=1, host="here") as link:
            assert eventually(lambda: 1 in channel.health), (
                "a task that hangs before its first heartbeat is known"
            )
            assert channel.health[1][1:] == (0, RankHealth())
            assert link.heartbeat(4, health)
            assert eventually(lambda: channel.health[1].number > 0)
            received_at, number, received = channel.health[1]
            assert (number, received) == (4, health)
            link.line("one")
            assert eventually(lambda: channel.health[1].received_at > received_at), (
                "any message is a heartbeat"
            )
        assert eventually(lambda: channel.health == {})
        assert channel.hosts == {1: "here"}


def test_stop_reason_keeps_whether_a_rank_hangs() -> None:
    secret = new_secret()
    heard: list[StopReason] = []
    with DriverChannel(secret, 1) as channel, DriverLink(channel.address, secret, rank=0, host="a") as link:
        link.watch(heard.append)
        channel.cancel(StopReason("rank 0 hangs", is_hang=True))
        assert eventually(lambda: bool(heard))
    assert heard[0] == "rank 0 hangs"
    assert heard[0].is_hang


def test_task_does_not_wait_for_a_driver_that_ignores_messages() -> None:
    secret = new_secret()
    with DriverChannel(secret, 1) as channel:
        channel.ignore_messages()
        with DriverLink(channel.address, secret, rank=0, host="here") as link:
            for number in range(MAX_WAITING_MESSAGES + 1):
                link.event({"number": number})
        channel.wait_until_disconnected(30)
        assert channel.next_message(0.0) is None
        assert channel.failures == []
