"""Messages between two ranks. Runs on ranks."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.collective.telemetry.monitor import OperationTotals
from sparkdl.errors import MismatchError, ParamError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkdl.collective import Communicator


def _in_order_of_sending(communicator: Communicator) -> None:
    if communicator.rank == 0:
        handles = [communicator.send_async(np.full(100, number), to=1, tag=3) for number in range(10)]
    elif communicator.rank == 1:
        arrays = [np.zeros(100, np.int64) for _ in range(10)]
        handles = [communicator.recv_async(array, source=0, tag=3) for array in arrays]
    else:
        return
    for handle in handles:
        handle.wait()
        assert handle.done()
    if communicator.rank == 1:
        assert [array[0] for array in arrays] == list(range(10))


def _tags_do_not_wait_for_each_other(communicator: Communicator) -> None:
    if communicator.rank == 0:
        late = communicator.recv_async(np.zeros(1), source=1, tag=1)
        communicator.send(np.full(3, 7.0), to=1, tag=2)
        assert not late.done()
        communicator.send(np.full(3, 8.0), to=1, tag=0)
        late.wait()
    elif communicator.rank == 1:
        array = np.zeros(3)
        communicator.recv(array, source=0, tag=2)
        assert array[0] == 7.0
        communicator.recv(array, source=0, tag=0)
        assert array[0] == 8.0
        communicator.send(np.ones(1), to=0, tag=1)


def _many_tags(communicator: Communicator) -> None:
    """Any number of tags, in any order, needs no more threads and descriptors than one tag."""
    if communicator.rank > 1:
        return
    peer, tags = 1 - communicator.rank, list(range(200))
    _swap(communicator, peer, [0])
    before = _threads_and_descriptors()
    _swap(communicator, peer, tags)
    assert _threads_and_descriptors() == before


def _swap(communicator: Communicator, peer: int, tags: list[int]) -> None:
    """Send messages to a rank, which receives them in the reverse order, and receive its messages the same way."""
    arrays = {tag: np.zeros(3) for tag in tags}
    handles = [communicator.send_async(np.full(3, float(tag)), to=peer, tag=tag) for tag in tags]
    handles += [communicator.recv_async(arrays[tag], source=peer, tag=tag) for tag in reversed(tags)]
    for handle in handles:
        handle.wait()
    assert all(array.tolist() == [float(tag)] * 3 for tag, array in arrays.items())


def _threads_and_descriptors() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def _messages_are_counted(communicator: Communicator) -> None:
    if communicator.rank > 1:
        return
    before = _totals(communicator)
    for _ in range(3):
        if communicator.rank == 0:
            communicator.send(np.ones(10), to=1, tag=9)
        else:
            communicator.recv(np.ones(10), source=0, tag=9)
    kind = ("send", "recv")[communicator.rank]
    count, num_bytes = (
        now - then for now, then in zip(_totals(communicator)[kind], before[kind], strict=True)
    )
    assert (count, num_bytes) == (3, 240)


def _totals(communicator: Communicator) -> dict[str, tuple[int, int]]:
    told = [OperationTotals._make(counts) for monitor in communicator.monitors for counts in monitor.totals()]
    found = {totals.kind: (totals.num_operations, totals.bytes) for totals in told}
    return {"send": (0, 0), "recv": (0, 0), **found}


def _beside_collectives(communicator: Communicator) -> None:
    """Waiting for a message does not delay collectives."""
    out, total = np.zeros(5), np.ones(4)
    handle = communicator.recv_async(out, source=1) if communicator.rank == 0 else None
    communicator.allreduce(total)
    assert total[0] == communicator.world_size
    if communicator.rank == 1:
        communicator.send(np.full(5, 3.0), to=0)
    if handle is not None:
        handle.wait()
        assert out.tolist() == [3.0] * 5


def _from_any_rank(communicator: Communicator) -> None:
    """Each message is delivered once, to a receive from any rank or from its sender, among others with its tag."""
    world_size, rank = communicator.world_size, communicator.rank
    others = [other for other in range(world_size) if other != rank]
    sent = [
        communicator.send_async(np.full(1000 * tag, 10.0 * rank + tag), to=other, tag=tag)
        for tag in (1, 2)
        for other in others
    ]
    for tag in (2, 1):
        rooms = [np.zeros(1000 * tag) for _ in others]
        received = [communicator.recv_async(room, source=None, tag=tag) for room in rooms]
        for handle, room in zip(received, rooms, strict=True):
            handle.wait()
            assert (room == 10.0 * handle.source + tag).all()
        assert sorted(handle.source for handle in received) == others
    for handle in sent:
        handle.wait()


def _from_any_rank_and_from_one(communicator: Communicator) -> None:
    """Each message is delivered once and whole to one receive; equal receives get messages in the order of sending."""
    if communicator.rank == 0:
        by_name, of_any = [np.zeros(1_000_003) for _ in range(2)], [np.zeros(1_000_003) for _ in range(2)]
        handles = [communicator.recv_async(array, source=1, tag=4) for array in by_name]
        handles += [communicator.recv_async(array, source=None, tag=4) for array in of_any]
        communicator.barrier()
        for handle in handles:
            handle.wait()
        alike = [[array[0] for array in arrays] for arrays in (by_name, of_any)]
        assert all(numbers == sorted(numbers) for numbers in alike)
        assert sorted(alike[0] + alike[1]) == [0.0, 1.0, 2.0, 3.0]
        assert all((array == array[0]).all() for array in by_name + of_any)
        assert [handle.source for handle in handles] == [1] * 4
    else:
        communicator.barrier()
        if communicator.rank == 1:
            for number in range(4):
                communicator.send(np.full(1_000_003, float(number)), to=0, tag=4)


def _mismatch_from_any_rank(communicator: Communicator) -> None:
    if communicator.rank == 0:
        message = _mismatch_of(lambda: communicator.recv(np.zeros(3), source=None, tag=6))
        communicator.recv(np.zeros(2), source=None, tag=6)
    elif communicator.rank == 1:
        message = _mismatch_of(lambda: communicator.send(np.ones(2), to=0, tag=6))
        communicator.send(np.ones(2), to=0, tag=6)
    else:
        return
    assert "rank 1 said send of 2 float64" in message
    assert "rank 0 said recv of 3 float64 from rank 1" in message


def _mismatch(communicator: Communicator) -> None:
    """Both ends get the same error, nothing is written, and later messages are delivered."""
    wrong = {
        "11 float64": np.zeros(11),
        "10 int64": np.zeros(10, np.int64),
    }
    for expected, room in wrong.items():
        if communicator.rank == 0:
            message = _mismatch_of(lambda: communicator.send(np.ones(10), to=1, tag=5))
            communicator.send(np.full(2, 6.0), to=1, tag=5)
        elif communicator.rank == 1:
            message = _mismatch_of(lambda room=room: communicator.recv(room, source=0, tag=5))
            assert not room.any()
            out = np.zeros(2)
            communicator.recv(out, source=0, tag=5)
            assert out.tolist() == [6.0, 6.0]
        else:
            continue
        assert "rank 0 said send of 10 float64 to rank 1" in message
        assert f"rank 1 said recv of {expected} from rank 0" in message
    communicator.barrier()
    assert communicator.failure is None


def _mismatch_of(call: Callable[[], object]) -> str:
    try:
        call()
    except MismatchError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def _impossible_peers_are_refused(communicator: Communicator) -> None:
    for peer in (-1, communicator.world_size, communicator.rank):
        for call in (
            lambda peer=peer: communicator.send(np.ones(1), to=peer),
            lambda peer=peer: communicator.recv(np.ones(1), source=peer),
        ):
            try:
                call()
            except ParamError:
                continue
            raise AssertionError(f"rank {peer} was accepted")
    assert communicator.failure is None


def _in_worlds_of_two(check: Callable[[Communicator], None]) -> Callable[[Communicator], None]:
    def run(communicator: Communicator) -> None:
        if communicator.world_size > 1:
            check(communicator)

    return run


MESSAGE_CHECKS: dict[str, Callable[[Communicator], None]] = {
    "messages in order of sending": _in_worlds_of_two(_in_order_of_sending),
    "tags do not wait for each other": _in_worlds_of_two(_tags_do_not_wait_for_each_other),
    "many tags": _in_worlds_of_two(_many_tags),
    "messages are counted": _in_worlds_of_two(_messages_are_counted),
    "messages beside collectives": _in_worlds_of_two(_beside_collectives),
    "mismatch of a message": _in_worlds_of_two(_mismatch),
    "messages from any rank": _in_worlds_of_two(_from_any_rank),
    "messages from any rank and from one": _in_worlds_of_two(_from_any_rank_and_from_one),
    "mismatch of a message from any rank": _in_worlds_of_two(_mismatch_from_any_rank),
    "impossible peers are refused": _impossible_peers_are_refused,
}
