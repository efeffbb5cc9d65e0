"""After thousands of mixed operations ranks hold no more resources than after the first half of them."""

from __future__ import annotations

import pytest

from tests.collective.scenes.programs import Scope
from tests.collective.scenes.soak import SIZES, Soaked, soak
from tests.run_ranks import run_ranks

SCOPE = Scope(sizes=SIZES)
SEED = 20


def check(soaked: list[Soaked], *, bytes_per_operation: float) -> None:
    assert [rank.failure for rank in soaked] == [""] * len(soaked)
    for rank in soaked:
        growth = rank.warm.growth_to(rank.wet)
        assert growth.pop("private_bytes", 0) <= bytes_per_operation * rank.num_operations / 2
        assert growth == {}
        assert rank.wet.num_segments == 0


@pytest.mark.slow
def test_five_thousand_operations_leave_nothing_behind() -> None:
    soaked = run_ranks(2, soak, (0, 0), 5000, SCOPE, SEED, transport="shm", timeout_s=170.0)
    check(soaked, bytes_per_operation=2000.0)
    assert soaked[0].num_process_sets >= 200
    assert soaked[0].num_mismatches >= 100
    assert soaked[0].num_recoveries >= 5


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("transport", "host_of_rank"),
    [("shm", (0, 0)), ("tcp", (0, 0)), ("native", (0, 1, 0)), ("mpi", (0, 0))],
)
def test_hundred_thousand_operations_leave_nothing_behind(
    transport: str, host_of_rank: tuple[int, ...]
) -> None:
    soaked = run_ranks(
        len(host_of_rank), soak, host_of_rank, 100_000, SCOPE, SEED, transport=transport, timeout_s=7000.0
    )
    # NumPy keeps freed blocks of every size that the arrays of the tests had, a few MiB in total. Once MPICH is
    # loaded, every thread that was ever started keeps 300 bytes; a process set starts two.
    check(soaked, bytes_per_operation=200.0 if transport == "mpi" else 100.0)
