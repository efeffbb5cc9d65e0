"""An array of more than 4 GiB, whose elements a 32-bit integer cannot count, is communicated whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.run_ranks import run_ranks

if TYPE_CHECKING:
    from tests.run_ranks import RankEnvironment

PIECE = 64 << 20
NUM_ELEMENTS = (4 << 30) + PIECE
ROOT = 1

Array = np.ndarray[Any, np.dtype[np.uint8]]


def communicate(environment: RankEnvironment) -> dict[str, list[int]]:
    """The numbers of the wrong pieces after each operation."""
    world_size, rank = environment.world_size, environment.rank
    pieces = np.empty((NUM_ELEMENTS // PIECE, PIECE), np.uint8)
    with environment.open(timeout_s=300.0) as communicator:
        _fill(pieces, rank)
        communicator.allreduce(pieces)
        # Sums of uint8 wrap around.
        wrong = {"allreduce": _wrong(pieces, world_size, 3 * sum(range(world_size)))}
        _fill(pieces, rank)
        communicator.broadcast(pieces, root=ROOT)
        wrong["broadcast"] = _wrong(pieces, 1, 3 * ROOT)
    return wrong


def _fill(pieces: Array, rank: int) -> None:
    """Fill each piece with a pattern whose period is no power of two; no two pieces are equal."""
    pieces[:] = np.resize(np.arange(251, dtype=np.uint8), PIECE)
    for number in range(len(pieces)):
        pieces[number] += np.uint8((7 * number + 3 * rank) % 256)


def _wrong(pieces: Array, factor: int, more: int) -> list[int]:
    base = np.resize(np.arange(251, dtype=np.uint8), PIECE) * np.uint8(factor)
    return [
        number
        for number, piece in enumerate(pieces)
        if not np.array_equal(piece, base + np.uint8((7 * number * factor + more) % 256))
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["shm", "tcp", "mpi"])
def test_array_above_4_gib_is_communicated_whole(transport: str) -> None:
    for wrong in run_ranks(2, communicate, transport=transport, timeout_s=850.0):
        assert wrong == {"allreduce": [], "broadcast": []}
