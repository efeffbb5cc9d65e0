from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.collective.telemetry.stalls import Wait
from sparkdl.errors import AuthenticationError
from sparkdl.launch.wire.channel import MAX_WAITING_MESSAGES, PURPOSE, DriverChannel, DriverLink, driver_hosts
from sparkdl.launch.wire.messages import MessageConnection
from sparkdl.launch.wire.outcome import RankSigns, StopReason
from sparkdl.rendezvous.addresses import reachable_hosts
from sparkdl.rendezvous.channel import new_secret
from sparkdl.rendezvous.dialing import connect_authenticated
from tests.collective.eventually import eventually


def test_lines_and_events_arrive_in_order_and_silence_follows() -> None:
    secret = new_secret()
    with DriverChannel(secret, 2) as channel:
        with DriverLink(channel.address, secret, rank=1, host="here") as link:
            link.started()
            link.line("one")
            link.event({"loss": 0.5})
        first, second = channel.next_message(10), channel.next_message(10)
        channel.wait_until_silent(10)
        assert first is not None
        assert second is not None
        assert (first.rank, first.line) == (1, "one")
        assert second.event == {"loss": 0.5}
        assert channel.started == {1}
        assert channel.failures == []


def test_task_that_falls_silent_without_goodbye_is_a_failure() -> None:
    secret = new_secret()
    with DriverChannel(secret, 2) as channel:
        sock = connect_authenticated(channel.address, secret, purpose=PURPOSE, timeout_s=10)
        MessageConnection(sock).send({"kind": "hello", "rank": 3, "host": "far"})
        sock.close()
        assert eventually(lambda: bool(channel.failures))
        (failure,) = channel.failures
    assert (failure.rank, failure.host) == (3, "far")
    assert "lost" in failure.error


def test_cancel_reaches_tasks_that_are_there_and_those_that_come() -> None:
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
            assert both.acquire(timeout=10)
            assert both.acquire(timeout=10)
    assert reasons == ["enough", "enough"]


def test_task_that_comes_after_the_end_knows_so_before_it_does_anything() -> None:
    secret = new_secret()
    with DriverChannel(secret, 1) as channel:
        channel.cancel(StopReason("enough"))
        for _ in range(50):
            reasons: list[str] = []
            with DriverLink(channel.address, secret, rank=0, host="a") as late:
                late.watch(reasons.append)
                assert reasons == ["enough"], "at once, from no other thread"


def test_stranger_is_not_heard() -> None:
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


def test_signs_of_life_arrive_with_their_number_and_go_with_the_task() -> None:
    secret = new_secret()
    signs = RankSigns(silent_s=1.5, waits=(Wait("world", (0, 1), "barrier", 2.0, 60.0),))
    with DriverChannel(secret, 2) as channel:
        with DriverLink(channel.address, secret, rank=1, host="here") as link:
            assert eventually(lambda: 1 in channel.signs), "a task that stands still at once is missed, too"
            assert channel.signs[1][1:] == (0, RankSigns())
            assert link.beat(4, signs)
            assert eventually(lambda: channel.signs[1][1] > 0)
            at, number, heard = channel.signs[1]
            assert (number, heard) == (4, signs)
            link.line("one")
            assert eventually(lambda: channel.signs[1][0] > at), "whatever a task says, it lives"
        assert eventually(lambda: channel.signs == {})
        assert channel.hosts == {1: "here"}


def test_stop_says_whether_a_rank_hangs() -> None:
    secret = new_secret()
    heard: list[StopReason] = []
    with DriverChannel(secret, 1) as channel, DriverLink(channel.address, secret, rank=0, host="a") as link:
        link.watch(heard.append)
        channel.cancel(StopReason("rank 0 hangs", is_hang=True))
        assert eventually(lambda: bool(heard))
    assert heard[0] == "rank 0 hangs"
    assert heard[0].is_hang


def test_task_that_proves_itself_while_the_channel_closes_is_turned_away() -> None:
    is_proven, goes_on = threading.Event(), threading.Event()

    class SlowChannel(DriverChannel):
        def _serve_in_thread(self, sock: socket.socket) -> None:
            is_proven.set()
            assert goes_on.wait(30)
            super()._serve_in_thread(sock)

    secret = new_secret()
    with SlowChannel(secret, 1) as channel:
        sock = connect_authenticated(channel.address, secret, purpose=PURPOSE, timeout_s=10)
        assert is_proven.wait(10)
    goes_on.set()
    with sock:
        sock.settimeout(5)
        assert sock.recv(1) == b"", "it is to take its driver for gone"


def test_task_does_not_wait_for_a_driver_that_no_longer_takes_messages() -> None:
    secret = new_secret()
    with DriverChannel(secret, 1) as channel:
        channel.ignore_messages()
        with DriverLink(channel.address, secret, rank=0, host="here") as link:
            for number in range(MAX_WAITING_MESSAGES + 1):
                link.event({"number": number})
        channel.wait_until_silent(30)
        assert channel.next_message(0.0) is None
        assert channel.failures == []


def session_of(**settings: str) -> Any:
    conf = {name.replace("_", "."): value for name, value in settings.items()}
    return SimpleNamespace(sparkContext=SimpleNamespace(getConf=lambda: conf))


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*, 4]", "local-cluster[2,1,1024]"])
def test_driver_of_a_local_session_listens_on_loopback(master: str) -> None:
    assert driver_hosts(session_of(spark_master=master, spark_driver_host="node-1")) == ["127.0.0.1"]


def test_driver_listens_where_executors_reach_sparks_own(caplog: pytest.LogCaptureFixture) -> None:
    master, own = "spark://node-1:7077", reachable_hosts()[0]
    assert driver_hosts(session_of(spark_master=master, spark_driver_host=own)) == (own,)
    assert driver_hosts(session_of(spark_master=master, spark_driver_host="127.0.0.1")) == ("127.0.0.1",)
    behind_nat = session_of(
        spark_master=master, spark_driver_host="198.51.100.7", spark_driver_bindAddress=own
    )
    assert driver_hosts(behind_nat) == (own,)
    assert not caplog.records
    unknown = session_of(
        spark_master=master, spark_driver_host="198.51.100.8", spark_driver_bindAddress="0.0.0.0"
    )
    assert driver_hosts(unknown) == reachable_hosts()
    assert "spark.driver.host='198.51.100.8' is no address of this machine" in caplog.text
