from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from sparkdl.collective.telemetry.stalls import Wait
from sparkdl.errors import AuthenticationError
from sparkdl.launch.wire.channel import MAX_WAITING_MESSAGES, PURPOSE, DriverChannel, DriverLink
from sparkdl.launch.wire.messages import MessageConnection
from sparkdl.launch.wire.outcome import RankHealth, StopReason
from sparkdl.rendezvous.dialing import connect_authenticated
from sparkdl.rendezvous.handshake import new_secret
from tests.collective.eventually import eventually

SECRET = new_secret()


@pytest.fixture
def channel() -> Iterator[DriverChannel]:
    with DriverChannel(SECRET, 2) as channel:
        yield channel


def link_to(channel: DriverChannel, rank: int = 0) -> DriverLink:
    return DriverLink(channel.address, SECRET, rank=rank, host="here")


def test_lines_and_events_arrive_in_order(channel: DriverChannel) -> None:
    with link_to(channel, rank=1) as link:
        link.report_start()
        link.line("one")
        link.event({"loss": 0.5})
    first, second = channel.next_message(10), channel.next_message(10)
    channel.wait_until_disconnected(10)
    assert (first.rank, first.line) == (1, "one")
    assert second.event == {"loss": 0.5}
    assert channel.started == {1}
    assert channel.failures == []


def test_task_that_disconnects_without_goodbye_is_a_failure(channel: DriverChannel) -> None:
    sock = connect_authenticated(channel.address, SECRET, purpose=PURPOSE, timeout_s=10)
    MessageConnection(sock).send({"kind": "hello", "rank": 3, "host": "far"})
    sock.close()
    assert eventually(lambda: bool(channel.failures))
    (failure,) = channel.failures
    assert (failure.rank, failure.host) == (3, "far")
    assert "lost" in failure.error


@pytest.mark.parametrize("is_hang", [False, True])
def test_cancel_reaches_connected_tasks_and_later_ones_at_once(channel: DriverChannel, is_hang: bool) -> None:
    early_reasons: list[StopReason] = []
    with link_to(channel) as early:
        early.watch(early_reasons.append)
        channel.cancel(StopReason("enough", is_hang=is_hang))
        for _ in range(50):
            reasons: list[StopReason] = []
            with link_to(channel, rank=1) as late:
                late.watch(reasons.append)
                assert reasons == ["enough"], "at once, from no other thread"
                assert reasons[0].is_hang == is_hang
        assert eventually(lambda: early_reasons == ["enough"], timeout_s=60)
        assert early_reasons[0].is_hang == is_hang


def test_task_without_the_secret_is_refused(channel: DriverChannel) -> None:
    with pytest.raises(AuthenticationError):
        connect_authenticated(channel.address, new_secret(), purpose=PURPOSE, timeout_s=10)


def test_lines_are_kept_when_the_driver_is_out_of_reach() -> None:
    with DriverChannel(SECRET, 2) as gone:
        pass
    with link_to(gone) as link:
        link.line("kept")
        link.unsent.seek(0)
        assert link.unsent.read() == b"kept\n"


def test_message_larger_than_allowed_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((1 << 31).to_bytes(4, "big"))
        assert MessageConnection(ours).receive() is None


def test_health_arrives_with_its_number_and_is_dropped_with_the_task(channel: DriverChannel) -> None:
    health = RankHealth(silent_s=1.5, waits=(Wait("world", (0, 1), "barrier", 2.0, 60.0),))
    with link_to(channel, rank=1) as link:
        assert eventually(lambda: 1 in channel.health), (
            "a task that hangs before its first heartbeat is known"
        )
        assert channel.health[1][1:] == (0, RankHealth())
        assert link.heartbeat(4, health)
        assert eventually(lambda: channel.health[1].number > 0)
        received_at, number, received = channel.health[1]
        assert (number, received) == (4, health)
        link.line("one")
        assert eventually(lambda: channel.health[1].received_at > received_at), "any message is a heartbeat"
    assert eventually(lambda: channel.health == {})
    assert channel.hosts == {1: "here"}


def test_task_does_not_wait_for_a_driver_that_ignores_messages(channel: DriverChannel) -> None:
    channel.takes_messages = False
    with link_to(channel) as link:
        for number in range(MAX_WAITING_MESSAGES + 1):
            link.event({"number": number})
    channel.wait_until_disconnected(30)
    assert channel.next_message(0.0) is None
    assert channel.failures == []


def test_wake_hides_no_message(channel: DriverChannel) -> None:
    channel.wake()
    with link_to(channel) as link:
        link.line("the last one")
    channel.wait_until_disconnected(10)
    assert channel.next_message(0.0).line == "the last one"
    assert channel.next_message(60.0) is None, "the end of the last connection wakes, too"
