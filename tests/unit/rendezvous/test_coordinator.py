from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from sparkdl.collective import (
    Address,
    Coordinator,
    Deadline,
    RendezvousClient,
    all_gather_bytes,
    connect_authenticated,
    new_secret,
)
from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError
from sparkdl.rendezvous.coordinator import PURPOSE
from sparkdl.rendezvous.frames import HEADER
from sparkdl.rendezvous.protocol import MAX_VALUE_BYTES, Operation, pack
from sparkdl.rendezvous.store import Rendezvous, answered_by
from sparkdl.topology import name_ranks
from tests.collective.eventually import eventually

SECRET = new_secret()

Connect = Callable[[], RendezvousClient]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """A function that connects a client to a coordinator; all clients share one coordinator."""
    clients: list[RendezvousClient] = []
    with Coordinator(secret=SECRET, world_size=4) as coordinator:

        def make() -> RendezvousClient:
            clients.append(RendezvousClient.connect(coordinator.address, SECRET, 10.0))
            return clients[-1]

        yield make
        for client in clients:
            client.close()


def connect_by_socket(address: Address) -> tuple[RendezvousClient, socket.socket]:
    sock = connect_authenticated(address, SECRET, purpose=PURPOSE, timeout_s=5.0)
    return RendezvousClient(sock, address), sock


def test_get_that_waits_in_vain_names_the_key_and_the_time(connect: Connect) -> None:
    with pytest.raises(CommunicatorTimeoutError, match=r"'absent' within 0\.1 s"):
        connect().get("absent", 0.1)


def test_long_get_does_not_keep_other_threads_of_the_client_from_setting(connect: Connect) -> None:
    client = connect()
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(client.get, f"key/{number}", 30.0) for number in range(5)]
        for number in reversed(range(5)):
            client.set(f"key/{number}", str(number).encode())
        assert [answer.result(5.0) for answer in answers] == [b"0", b"1", b"2", b"3", b"4"]


def test_add_counts_from_zero_and_reads_as_text(connect: Connect) -> None:
    client = connect()
    assert client.add("count", 5) == 5
    assert client.add("count", -7) == -2
    assert client.get("count", 1.0) == b"-2"


def test_adding_to_a_value_that_is_no_number_is_refused(connect: Connect) -> None:
    client = connect()
    client.set("text", b"text")
    with pytest.raises(CommunicatorError, match="refused ADD"):
        client.add("text", 1)
    assert client.get("text", 1.0) == b"text"


def test_concurrent_adds_lose_nothing(connect: Connect) -> None:
    clients = [connect() for _ in range(4)]
    with ThreadPoolExecutor() as pool:
        for client in clients:
            for _ in range(25):
                pool.submit(client.add, "count", 1)
    assert clients[0].add("count", 0) == 100


def test_compare_set_behaves_as_a_c10d_store(connect: Connect) -> None:
    client = connect()
    assert client.compare_set("key", b"guess", b"new") == b"guess"
    assert not client.check(["key"])
    assert client.compare_set("key", b"", b"first") == b"first"
    assert client.compare_set("key", b"wrong", b"second") == b"first"
    assert client.compare_set("key", b"first", b"second") == b"second"


def test_delete_check_and_num_keys_agree(connect: Connect) -> None:
    client = connect()
    client.set("a/1", b"")
    client.set("a/2", b"")
    client.set("b", b"")
    assert client.check(["a/1", "b"])
    assert not client.check(["a/1", "c"])
    assert (client.num_keys(), client.view("a").num_keys()) == (3, 2)
    assert client.delete("a/1")
    assert not client.delete("a/1")
    assert client.view("a").num_keys() == 1


def test_views_with_different_prefixes_do_not_meet(connect: Connect) -> None:
    client = connect()
    left, right = client.view("left"), client.view("right")
    left.set("key", b"l")
    right.set("key", b"r")
    assert (left.get("key", 1.0), right.get("key", 1.0)) == (b"l", b"r")
    assert client.get("left/key", 1.0) == b"l"
    assert left.num_keys() == 1
    assert left.add("count", 1) == right.add("count", 1) == 1
    assert left.check(["key"])
    assert left.compare_set("key", b"l", b"L") == b"L"
    assert left.delete("key")
    assert right.check(["key"])


def test_large_value_arrives_whole(connect: Connect) -> None:
    value = bytes(range(256)) * (20 << 12)
    connect().set("large", value)
    assert connect().get("large", 30.0) == value


def test_value_above_the_bound_is_refused_with_the_bound(connect: Connect) -> None:
    with pytest.raises(CommunicatorError, match=f"at most {MAX_VALUE_BYTES}"):
        connect().set("huge", bytes(MAX_VALUE_BYTES + 1))


def test_close_ends_the_waits_of_other_threads(connect: Connect) -> None:
    client = connect()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(client.get, "never", 30.0)
        connect().set("unrelated", b"")
        client.close()
        with pytest.raises(CommunicatorError):
            answer.result(5.0)
    client.close()


def test_close_between_packing_and_sending_a_request_raises_the_same_error(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect()
    requested, closed = threading.Event(), threading.Event()

    def pack_slowly(number: int, operation: Operation, fields: tuple[bytes, ...]) -> bytes:
        if operation == Operation.GET:
            requested.set()
            assert closed.wait(10.0)
        return pack(number, operation, fields)

    monkeypatch.setattr("sparkdl.rendezvous.client.pack", pack_slowly)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(client.get, "never", 30.0)
        assert requested.wait(10.0)
        client.close()
        closed.set()
        with pytest.raises(CommunicatorError, match="this rank closed its rendezvous"):
            answer.result(5.0)


def test_lost_coordinator_ends_waits_with_an_error() -> None:
    with Coordinator(secret=SECRET, world_size=1) as coordinator:
        client = RendezvousClient.connect(coordinator.address, SECRET, 10.0)
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(client.get, "never", 30.0)
            client.set("the wait has begun by now", b"")
            coordinator.close()
            with pytest.raises(CommunicatorError, match="lost the connection to the coordinator"):
                answer.result(5.0)
    with pytest.raises(CommunicatorError):
        client.set("key", b"")
    client.close()


def test_coordinator_drops_a_client_that_breaks_the_protocol_and_serves_the_others(connect: Connect) -> None:
    client = connect()
    for damaged in (
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x03abc",
        HEADER.pack(11) + pack(1, Operation.SET, []),
        b"\x00\x00\x00\x0b" + b"\x00" * 10 + b"\x07",
    ):
        with connect_authenticated(client.address, SECRET, purpose=PURPOSE, timeout_s=5.0) as broken:
            broken.sendall(damaged)
            broken.settimeout(5.0)
            broken.recv(100)
    assert client.add("alive", 1) == 1


def test_last_words_are_posted_when_a_client_is_lost_but_not_when_it_says_goodbye(connect: Connect) -> None:
    leaving, silent, watching = connect(), connect(), connect()
    lost, sock = connect_by_socket(watching.address)
    lost.post_if_lost("news", b"lost")
    leaving.post_if_lost("news", b"left")
    silent.view("news").post_if_lost("", b"silent")
    silent.view("news").post_if_lost("", b"")
    leaving.close()
    silent.close()
    sock.shutdown(socket.SHUT_RDWR)  # as if the process had died
    lost.close()
    assert watching.get("news/1", 5.0) == b"lost"
    assert watching.post("news", b"next") == 2
    assert watching.get("news/2", 5.0) == b"next"


def test_post_is_one_request_so_that_no_death_leaves_a_gap_in_a_queue(connect: Connect) -> None:
    class Dying(RendezvousClient):
        """Fails to send a second request."""

        def set(self, key: str, value: bytes) -> None:
            raise CommunicatorError("the process has died")

    watching = connect()
    sock = connect_authenticated(watching.address, SECRET, purpose=PURPOSE, timeout_s=5.0)
    with Dying(sock, watching.address) as dying:
        assert dying.view("world").post("notices", b"first") == 1
    assert watching.view("world").post("notices", b"second") == 2
    assert [watching.get(f"world/notices/{number}", 5.0) for number in (1, 2)] == [b"first", b"second"]


def keys_only(client: RendezvousClient) -> RendezvousClient:
    """A view of a store with only the operations that every rendezvous must have; it inherits the others."""
    view = client.view("keys")
    view.__class__ = type("KeysOnly", (RendezvousClient,), {"_exchange": Rendezvous._exchange})
    return view


both_ways = pytest.mark.parametrize("make", [lambda client: client.view("in a view"), keys_only])


def gather(clients: dict[int, Any], world_size: int, timeout_s: float) -> list[Future[list[bytes]]]:
    """Have ranks gather a value of their own length all at once; return their answers."""
    with ThreadPoolExecutor(max_workers=len(clients)) as pool:
        return [
            pool.submit(
                all_gather_bytes,
                client,
                key="k",
                rank=rank,
                world_size=world_size,
                value=b"ab" * rank,
                timeout_s=timeout_s,
            )
            for rank, client in clients.items()
        ]


@both_ways
def test_many_clients_gather_values_at_once_and_leave_no_keys_behind(
    connect: Connect, make: Callable[..., Any]
) -> None:
    answers = gather({rank: make(connect()) for rank in range(60)}, 60, timeout_s=30.0)
    assert [answer.result() for answer in answers] == [[b"ab" * rank for rank in range(60)]] * 60
    assert connect().num_keys() == 0


@both_ways
@pytest.mark.parametrize("present", [[0, 2], [1, 2]])
def test_all_gather_names_the_missing_ranks(
    connect: Connect, make: Callable[..., Any], present: list[int]
) -> None:
    missing = name_ranks(sorted({0, 1, 2, 3} - set(present)))
    for answer in gather({rank: make(connect()) for rank in present}, 4, timeout_s=0.3):
        with pytest.raises(CommunicatorTimeoutError, match=f"waited for {missing} of 4"):
            answer.result()


def test_exchange_can_be_repeated_and_may_not_exceed_the_bound(connect: Connect) -> None:
    clients = [connect(), connect()]
    with ThreadPoolExecutor() as pool:
        for turn in (b"first", b"second"):
            answers = [
                pool.submit(client.exchange, "k", rank=rank, world_size=2, value=turn, timeout_s=10.0)
                for rank, client in enumerate(clients)
            ]
            assert [answer.result() for answer in answers] == [[turn, turn]] * 2
    with pytest.raises(
        CommunicatorError, match=f"with 2 ranks, a value may have {MAX_VALUE_BYTES // 2} bytes"
    ):
        clients[0].exchange("k", rank=0, world_size=2, value=bytes(MAX_VALUE_BYTES // 2 + 1), timeout_s=1.0)


@both_ways
def test_rank_that_was_late_may_ask_for_an_exchange_again(connect: Connect, make: Callable[..., Any]) -> None:
    early, late = make(connect()), make(connect())
    gather = partial(all_gather_bytes, key="k", world_size=2, timeout_s=0.2)
    with pytest.raises(CommunicatorTimeoutError):
        gather(early, rank=1, value=b"1")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(gather, late, rank=0, value=b"0", timeout_s=10.0)
        assert answer.result() == [b"0", b"1"]
    assert gather(early, rank=1, value=b"1") == [b"0", b"1"]
    assert early.num_keys() == 0


def test_client_that_is_lost_in_an_exchange_is_not_waited_for(connect: Connect) -> None:
    there, last = connect(), connect()
    lost, sock = connect_by_socket(there.address)
    ask = partial(there.exchange, "k", rank=1, world_size=3, value=b"1")
    with ThreadPoolExecutor() as pool:
        broken = pool.submit(lost.exchange, "k", rank=0, world_size=3, value=b"0", timeout_s=30.0)
        assert eventually(lambda: ask(timeout_s=0.02) == {0, 1})
        waiting = pool.submit(ask, timeout_s=30.0)
        sock.shutdown(socket.SHUT_RDWR)  # as if the process had died
        with pytest.raises(CommunicatorError):
            broken.result(5.0)
        assert last.exchange("k", rank=2, world_size=3, value=b"2", timeout_s=30.0) == [b"0", b"1", b"2"]
        assert waiting.result(5.0) == [b"0", b"1", b"2"]
    lost.close()


def test_coordinator_that_reads_nothing_is_an_error_within_the_timeout() -> None:
    ours, theirs = socket.socketpair()
    with theirs, RendezvousClient(ours, Address(hosts=("127.0.0.1",), port=1)) as client:
        with answered_by(Deadline(0.2)), pytest.raises(CommunicatorError, match="took nothing for"):
            client.set("large", b"x" * 10_000_000)
        with pytest.raises(CommunicatorError, match="lost the connection"):
            client.set("small", b"x")


def test_coordinator_that_cannot_listen_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Cannot assign"):
        Coordinator(secret=SECRET, world_size=1, host="192.0.2.1")
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_the_coordinator_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with Coordinator(secret=SECRET, world_size=1) as coordinator:
        RendezvousClient.connect(coordinator.address, SECRET, 10.0).close()
    assert eventually(lambda: set(threading.enumerate()) <= before)
