"""Shutting Horovod down and initializing it again."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from operator import le

import pytest
import torch

import sparkdl.horovod.torch as hvd
from sparkdl.collective import current_communicator
from sparkdl.collective.telemetry.stalls import pending_waits
from sparkdl.errors import CommunicatorError
from tests.collective.eventually import eventually


def rank_of_launcher() -> int:
    return current_communicator().rank


def check_horovod_can_be_shut_down_and_initialized_again() -> None:
    handle = hvd.allreduce_async(torch.ones(1))
    hvd.synchronize(handle)
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.shutdown()
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.size()
    hvd.init()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    assert hvd.synchronize(handle) is None
    late = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    with pytest.raises(hvd.HorovodInternalError, match=f"handle {late} had not been synchronized before"):
        hvd.synchronize(late)


def check_what_is_outstanding_at_shutdown_fails_on_all_ranks() -> None:
    handle = hvd.allreduce_async(torch.ones(1), name=f"of rank {hvd.rank()}")
    if hvd.rank() == 0:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(hvd.synchronize, handle)
            hvd.shutdown()
            with pytest.raises(hvd.HorovodInternalError, match="Horovod has been shut down"):
                waiting.result()
    else:
        with pytest.raises(hvd.HorovodInternalError, match="rank 0 shut Horovod down while it had"):
            hvd.synchronize(handle)
        hvd.shutdown()
    hvd.init()
    hvd.barrier()


def check_a_signal_handler_cannot_call_horovod_in_the_middle_of_an_operation() -> None:
    """It would wait for the operation that waits for it."""
    refused: list[str] = []

    def handle(*_: object) -> None:
        for call in (hvd.shutdown, hvd.barrier):
            with pytest.raises(CommunicatorError, match="a signal handler called") as caught:
                call()
            refused.append(str(caught.value))
        current_communicator().rendezvous.set("refused", b"")

    main = threading.get_ident()

    def send() -> None:
        assert eventually(lambda: bool(pending_waits()), timeout_s=60.0)
        signal.pthread_kill(main, signal.SIGUSR1)

    if hvd.rank() == 0:
        before = signal.signal(signal.SIGUSR1, handle)
        sending = threading.Thread(target=send)
        sending.start()
    else:
        current_communicator().rendezvous.get("refused", 60.0)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    if hvd.rank() == 0:
        sending.join()
        signal.signal(signal.SIGUSR1, before)
        assert len(refused) == 2
    hvd.barrier()


def check_static_process_sets_are_opened_with_init() -> None:
    hvd.shutdown()
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
    hvd.init(process_sets=sets)
    assert [(ps.process_set_id, ps.ranks) for ps in sets] == [(1, [0]), (2, [1])]
    assert str(sets[1]) == "ProcessSet(process_set_id=2, ranks=[1], mpi_comm=None)"
    assert hvd.global_process_set.process_set_id == 0
    assert hvd.global_process_set.ranks == [0, 1]
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=sets[hvd.rank()]).item() == 1
    again = hvd.ProcessSet([1])
    hvd.init(process_sets=[again])
    assert again.process_set_id == 2
    with pytest.raises(ValueError, match="runs without"):
        hvd.init(process_sets=[hvd.ProcessSet([])])
    hvd.shutdown()
    hvd.init(process_sets="Dynamic")


def check_an_init_that_fails_leaves_nothing_open() -> None:
    hvd.shutdown()
    unwritable = f"{__file__}/below a file"
    open_before = count_open()
    for _ in range(3):
        with pytest.raises(ValueError, match="within 0 to 1"):
            hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([0, 99])])
        assert not hvd.is_initialized()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOROVOD_TIMELINE", unwritable)
            with pytest.raises(ValueError, match="cannot be written"):
                hvd.init(process_sets=[hvd.ProcessSet([1])])
        assert not hvd.is_initialized()
    assert eventually(lambda: all(map(le, count_open(), open_before)), timeout_s=20.0), count_open()
    hvd.init()
    hvd.barrier()


def count_open() -> tuple[int, int]:
    """Numbers of open descriptors and of threads of this rank."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def check_init_takes_some_of_the_ranks() -> None:
    hvd.shutdown()
    if rank_of_launcher() == 1:
        hvd.init([1])
        assert (hvd.rank(), hvd.size()) == (0, 1)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 1
        hvd.shutdown()
    else:
        with pytest.raises(ValueError, match="is not one of the ranks"):
            hvd.init([1])
    hvd.init()


class CommOfRanks:
    """The part of an mpi4py communicator that Horovod uses: gathering a value of each member, in order of rank."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks

    def allgather(self, value: int) -> list[int]:
        assert value in self.ranks
        return self.ranks


def check_process_sets_may_be_made_from_communicators_of_mpi4py() -> None:
    rank = hvd.rank()
    hvd.shutdown()
    own = hvd.ProcessSet(CommOfRanks([rank]))
    assert own.included() is None
    hvd.init(CommOfRanks([0, 1]), process_sets=[own])
    assert (own.process_set_id, own.ranks, own.size()) == (rank + 1, [rank], 1)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=own).item() == 1
    with pytest.raises(ValueError, match="mpi4py Comm object"):
        hvd.ProcessSet(3)
    with pytest.raises(ValueError, match="mpi4py Comm object"):
        hvd.ProcessSet(["a"])
    hvd.shutdown()
    hvd.init()


def check_horovods_module_of_collectives_is_there() -> None:
    assert hvd.mpi_ops.allreduce_async_ is hvd.allreduce_async_
    assert hvd.mpi_ops.synchronize is hvd.synchronize


def check_a_forked_child_ends_without_a_traceback() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 2)
        atexit._run_exitfuncs()
        os._exit(0)
    os.close(writer)
    with open(reader) as output:
        assert output.read() == ""
    os.waitpid(child, 0)
    assert hvd.allreduce(torch.ones(1)).item() == 1
