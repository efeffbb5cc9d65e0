"""The checks that every rank of a contract test runs: one world is started once for all checks. Runs on ranks.

The outcome of a check is None or the text of its failure.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.errors import CommunicatorError
from tests.collective.checks.address_checks import ADDRESS_CHECKS
from tests.collective.checks.agreement_checks import AGREEMENT_CHECKS
from tests.collective.checks.argument_checks import ARGUMENT_CHECKS
from tests.collective.checks.message_checks import MESSAGE_CHECKS
from tests.collective.checks.operation_checks import OPERATION_CHECKS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sparkdl.collective import Communicator
    from tests.run_ranks import RankEnvironment


def run_checks(environment: RankEnvironment, host_of_rank: Sequence[int] | None) -> dict[str, str | None]:
    """Run all checks on a communicator of all ranks."""
    with environment.open(host_of_rank=host_of_rank) as communicator:
        return check_communicator(communicator)


def check_communicator(communicator: Communicator) -> dict[str, str | None]:
    """Run all checks in the same order on every rank."""
    outcome: dict[str, str | None] = {}
    for name, check in CHECKS.items():
        try:
            check(communicator)
            outcome[name] = None
        except CommunicatorError:
            # The communicator is unusable, or the ranks are out of step: further checks would say nothing.
            outcome[name] = traceback.format_exc()
            return outcome
        except Exception:
            outcome[name] = traceback.format_exc()
    return outcome


def _asynchronous(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    arrays = [np.full(size, rank + 1, np.int64) for size in (3, 100_000, 1, 5000)]
    handles = [communicator.allreduce_async(array) for array in arrays]
    gathered = np.empty(world_size, np.int32)
    handles.append(communicator.allgather_async(np.array([rank], np.int32), gathered))
    scattered = np.empty(2)
    handles.append(communicator.reduce_scatter_async(np.ones(2 * world_size), scattered, op="max"))
    sent = np.array([rank], np.int64)
    handles.append(communicator.broadcast_async(sent, root=world_size - 1))
    group = [np.ones(3), np.ones(4)]
    handles.append(communicator.allreduce_group_async(group))
    exchanged = np.empty(world_size)
    handles.append(communicator.alltoall_async(np.arange(world_size, dtype=np.float64), exchanged))
    handles.append(communicator.barrier_async())
    # A synchronous operation runs after everything that is queued.
    total = np.ones(1)
    communicator.allreduce(total)
    assert all(handle.done() for handle in handles)
    for handle in reversed(handles):
        handle.wait(5.0)
    for array in arrays:
        assert (array == sum(range(1, world_size + 1))).all()
    assert gathered.tolist() == list(range(world_size))
    assert scattered.tolist() == [1.0, 1.0]
    assert sent[0] == world_size - 1
    assert group[1].tolist() == [world_size] * 4
    assert exchanged.tolist() == [rank] * world_size
    assert total[0] == world_size


def _repeated(communicator: Communicator) -> None:
    for size in (5, 1000, 300_000):
        array = np.random.default_rng([communicator.rank, size]).normal(size=size).astype(np.float32)
        again = array.copy()
        communicator.allreduce(array)
        communicator.allreduce(again)
        np.testing.assert_array_equal(array, again, err_msg="two runs differ")


def _barrier_holds_back(communicator: Communicator) -> None:
    rendezvous, world_size = communicator.rendezvous, communicator.world_size
    for turn in range(world_size):
        if communicator.rank == turn:
            rendezvous.set(f"before the barrier/{turn}", b"")
        communicator.barrier()
        assert rendezvous.check([f"before the barrier/{turn}"])


CHECKS: dict[str, Callable[[Communicator], None]] = {
    **OPERATION_CHECKS,
    **ADDRESS_CHECKS,
    "asynchronous": _asynchronous,
    "repeated": _repeated,
    "barrier holds back": _barrier_holds_back,
    **ARGUMENT_CHECKS,
    **AGREEMENT_CHECKS,
    **MESSAGE_CHECKS,
}
