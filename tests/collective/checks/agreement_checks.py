"""Operations on which the ranks disagree, and ranks that have no more data. Runs on ranks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sparkdl.collective import all_gather_bytes
from sparkdl.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkdl.collective import Communicator

Array = np.ndarray[Any, Any]


class Disagreement(NamedTuple):
    """What the last rank calls, what the others call, and how the error message describes both."""

    last: Callable[[Communicator, Array], object]
    others: Callable[[Communicator, Array], object]
    last_said: str
    others_said: str


def _uneven(communicator: Communicator, array: Array, more: int) -> None:
    world_size = communicator.world_size
    counts = [array.size] * (world_size - 1) + [array.size + more]
    out = np.zeros(sum(counts), array.dtype)
    block = array if communicator.rank < world_size - 1 else np.resize(array, counts[-1])
    communicator.allgather(block, out, counts=counts)


DISAGREEMENTS: dict[str, Disagreement] = {
    "count": Disagreement(
        lambda c, a: c.allreduce(a[:9]),
        lambda c, a: c.allreduce(a),
        "allreduce of 9 float32 by sum",
        "allreduce of 10 float32 by sum",
    ),
    "dtype": Disagreement(
        lambda c, a: c.allreduce(a.astype(np.int16), name="grad"),
        lambda c, a: c.allreduce(a, name="grad"),
        "allreduce 'grad' of 10 int16 by sum",
        "allreduce 'grad' of 10 float32 by sum",
    ),
    "name": Disagreement(
        lambda c, a: c.allreduce(a, name="bias"),
        lambda c, a: c.allreduce(a, name="weight"),
        "allreduce 'bias' of 10 float32 by sum",
        "allreduce 'weight' of 10 float32 by sum",
    ),
    "op": Disagreement(
        lambda c, a: c.allreduce(a, op="max"),
        lambda c, a: c.allreduce(a, op="min"),
        "by max",
        "by min",
    ),
    "scale": Disagreement(
        lambda c, a: c.allreduce(a, prescale=0.5), lambda c, a: c.allreduce(a, prescale=0.25), "0.5", "0.25"
    ),
    "root": Disagreement(
        lambda c, a: c.broadcast(a, root=0),
        lambda c, a: c.broadcast(a, root=1),
        "broadcast of 10 float32 from rank 0",
        "broadcast of 10 float32 from rank 1",
    ),
    "root of a reduce": Disagreement(
        lambda c, a: c.reduce(a, root=0), lambda c, a: c.reduce(a, root=1), "rank 0", "rank 1"
    ),
    "operation": Disagreement(
        lambda c, a: c.barrier(), lambda c, a: c.allreduce(a), "barrier", "allreduce of 10 float32 by sum"
    ),
    "group": Disagreement(
        lambda c, a: c.allreduce_group([a[:4], a[4:]]),
        lambda c, a: c.allreduce_group([a[:5], a[5:]]),
        "4",
        "5",
    ),
    "group of blocks": Disagreement(
        lambda c, a: _halves(c, a, 4),
        lambda c, a: _halves(c, a, 7),
        "allgather of 10 float32 in arrays of blocks (4",
        "(7",
    ),
    "shape": Disagreement(
        lambda c, a: c.allreduce(a.reshape(5, 2), name="weights"),
        lambda c, a: c.allreduce(a.reshape(2, 5), name="weights"),
        "allreduce 'weights' of 10 float32 of shape (5, 2)",
        "(2, 5)",
    ),
    "rows": Disagreement(
        lambda c, a: c.allgather(a.reshape(5, 2), np.zeros(10 * c.world_size, np.float32), name="rows"),
        lambda c, a: c.allgather(a.reshape(2, 5), np.zeros(10 * c.world_size, np.float32), name="rows"),
        "in rows of (2)",
        "in rows of (5)",
    ),
    "large": Disagreement(
        lambda c, a: c.allreduce(np.resize(a, 3_000_000)),
        lambda c, a: c.allreduce(a),
        "3000000 float32",
        "10 float32",
    ),
    "blocks": Disagreement(lambda c, a: _uneven(c, a, 1), lambda c, a: _uneven(c, a, 2), "11", "12"),
}


def _halves(communicator: Communicator, array: np.ndarray[Any, Any], first: int) -> None:
    """Gather ten elements of each rank in two arrays, the first of ``first`` elements."""
    parts = [array[:first], array[first:]]
    communicator.allgather_group(
        parts, [np.zeros(part.size * communicator.world_size, part.dtype) for part in parts]
    )


def _disagree(case: Disagreement) -> Callable[[Communicator], None]:
    def check(communicator: Communicator) -> None:
        world_size, rank = communicator.world_size, communicator.rank
        if world_size == 1:
            return  # no other rank to disagree with
        last = world_size - 1
        array = np.arange(10, dtype=np.float32) + rank
        message = _mismatch_of(lambda: (case.last if rank == last else case.others)(communicator, array))
        said = _who_said_what(message)
        assert set(said) == set(range(world_size)), message
        assert case.others_said in said[0], message
        assert case.last_said in said[last], message
        assert array.tolist() == [rank + number for number in range(10)], "something was written"
        _goes_on(communicator, message)

    return check


def _who_said_what(message: str) -> dict[int, str]:
    said = re.findall(r"ranks? (\d+(?:, \d+)*) said ((?:(?!; rank).)+)", message.split(": ", 1)[1])
    return {int(rank): text for ranks, text in said for rank in ranks.split(", ")}


def _exchange(communicator: Communicator) -> None:
    """In an alltoall rank 0 expects 7 elements from the last rank, which sends none."""
    world_size, rank = communicator.world_size, communicator.rank
    if world_size == 1:
        return
    receives = [0] * (world_size - 1) + [7 if rank == 0 else 0]
    out = np.zeros(sum(receives))
    message = _mismatch_of(
        lambda: communicator.alltoall(np.zeros(0), out, send_counts=[0] * world_size, receive_counts=receives)
    )
    assert f"rank {world_size - 1} sends 0 elements to rank 0, which expects 7" in message
    _goes_on(communicator, message)


def _queued(communicator: Communicator) -> None:
    """Of several queued operations only the mismatched one fails."""
    world_size, rank = communicator.world_size, communicator.rank
    if world_size == 1:
        return
    arrays = [np.ones(10 + (rank == 0 and number == 1)) for number in range(3)]
    handles = [
        communicator.allreduce_async(array, name=f"number {number}") for number, array in enumerate(arrays)
    ]
    handles[0].wait()
    message = _mismatch_of(handles[1].wait)
    handles[2].wait()
    assert [array[0] for array in arrays] == [world_size, 1.0, world_size]
    assert "allreduce 'number 1' of 11 float64 by sum" in message
    assert "allreduce 'number 1' of 10 float64 by sum" in message
    _goes_on(communicator, message)


def _goes_on(communicator: Communicator, message: str) -> None:
    """Assert that all ranks have the same message, and that the communicator is still usable."""
    assert communicator.failure is None
    total = np.ones(3)
    communicator.allreduce(total)
    assert total.tolist() == [communicator.world_size] * 3
    all_ranks = all_gather_bytes(
        communicator.rendezvous,
        key=f"mismatch/{message}",
        rank=communicator.rank,
        world_size=communicator.world_size,
        value=message.encode(),
        timeout_s=20.0,
    )
    assert set(all_ranks) == {message.encode()}


def _mismatch_of(call: Callable[[], object]) -> str:
    try:
        call()
    except MismatchError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def _join(communicator: Communicator) -> None:
    """Ranks run out of data one after another: first in rank order, then in reverse order, then all at once."""
    world_size, rank = communicator.world_size, communicator.rank
    for num_rounds, last in ((rank + 1, world_size - 1), (world_size - rank, 0)):
        for turn in range(num_rounds):
            total, mean, largest = np.ones(1000), np.full(3, 4.0 * world_size), np.full(2, -1, np.int32)
            communicator.allreduce(total)
            communicator.allreduce(mean, op="avg", name="mean")
            communicator.allreduce(largest, op="max")
            active = world_size - turn
            assert (total == active).all()
            assert (mean == 4.0 * active).all()
            assert largest.tolist() == [-1 if active == world_size else 0] * 2
        assert communicator.join() == last
    assert communicator.join() == world_size - 1
    total = np.ones(2)
    communicator.allreduce(total)
    assert total.tolist() == [world_size] * 2


def _joined_rank_takes_part(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    if rank > 0:
        gathered = np.full(2 * world_size, 9, np.int64)
        communicator.allgather(np.full(2, rank), gathered)
        assert gathered.tolist() == np.repeat(np.arange(world_size), 2).tolist()
        block = np.full(3, 9.0, np.float32)
        communicator.reduce_scatter(np.ones(3 * world_size, np.float32), block)
        assert block.tolist() == [world_size - 1] * 3
        # Equal blocks may also be given as counts, on only some of the ranks.
        counts = [3] * world_size if rank % 2 else None
        communicator.reduce_scatter(np.ones(3 * world_size, np.float32), block, counts=counts)
        assert block.tolist() == [world_size - 1] * 3
        group = [np.ones(4, np.float16), np.ones((2, 2), np.float16)]
        communicator.allreduce_group(group)
        assert all((array == world_size - 1).all() for array in group)
        communicator.barrier()
        handle = communicator.allreduce_async(np.ones(1))
        handle.wait()
    communicator.join()


def _mismatch_with_a_joined_rank(communicator: Communicator) -> None:
    """The other ranks learn which rank has joined, and the joined rank keeps waiting for them."""
    world_size, rank = communicator.world_size, communicator.rank
    if world_size == 1:
        return
    if rank > 0:
        array = np.ones(5)
        for name, call in {
            "broadcast": lambda: communicator.broadcast(array, root=world_size - 1),
            "alltoall": lambda: communicator.alltoall(np.ones(world_size), np.ones(world_size)),
        }.items():
            said = _who_said_what(_mismatch_of(call))
            assert said[0] == "join"
            assert said[rank].startswith(name)
        communicator.allreduce(array)
        assert array.tolist() == [world_size - 1] * 5
    assert communicator.join() == world_size - 1


AGREEMENT_CHECKS: dict[str, Callable[[Communicator], None]] = {
    **{f"mismatch of {name}": _disagree(case) for name, case in DISAGREEMENTS.items()},
    "mismatch of a queued operation": _queued,
    "mismatch of an exchange": _exchange,
    "join": _join,
    "joined rank takes part": _joined_rank_takes_part,
    "mismatch with a joined rank": _mismatch_with_a_joined_rank,
}
