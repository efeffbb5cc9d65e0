"""Checks of batches of messages whose tensors are on a GPU, for which tensors on torch's meta device stand."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sparkdl.patches.batches import install_batches
from sparkdl.torch import RendezvousStore
from sparkdl.torch.process_group import SparkdlProcessGroup
from sparkdl.torch.work import CompletedWork
from tests.checks import Outcomes, checks_in, outcome_of
from tests.run_ranks import RankEnvironment
from tests.torch.scenes.substitute_groups import default_group

SIZE = 2
TIMEOUT_S = 20.0


class Recorder:
    """An accelerator that notes what is called."""

    failure = None

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.calls: list[str] = []
        self.refuses = False

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append(f"start on {device}")

    def _end_coalescing(self, device: torch.device) -> CompletedWork:
        self.calls.append("end")
        return CompletedWork(())

    def drop_coalesced(self, device: torch.device) -> None:
        self.calls.append("drop")

    def send(self, tensors: Any, to: int, tag: int) -> None:
        if self.refuses:
            raise MemoryError("no memory")
        self.calls.append(f"send to {to}")

    def recv(self, tensors: Any, source: int, tag: int) -> None:
        self.calls.append(f"recv from {source}")

    def abort(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


RECORDER = Recorder()


def batch() -> tuple[list[dist.P2POp], torch.Tensor]:
    other, received = 1 - dist.get_rank(), torch.zeros(3)
    on_gpu = torch.zeros(3, device="meta")
    return [
        dist.P2POp(dist.isend, torch.full((3,), float(dist.get_rank())), other),
        dist.P2POp(dist.isend, on_gpu, other),
        dist.P2POp(dist.irecv, received, other),
        dist.P2POp(dist.irecv, on_gpu, other),
    ], received


def check_messages_of_gpu_tensors_start_together_and_all_works_are_returned() -> None:
    RECORDER.clear()
    other = 1 - dist.get_rank()
    operations, received = batch()
    works = dist.batch_isend_irecv(operations)
    assert RECORDER.calls == ["start on meta", f"send to {other}", f"recv from {other}", "end"]
    assert len(works) == 3
    for work in works:
        work.wait()
    assert received.tolist() == [float(other)] * 3


def check_group_works_on_after_an_error_in_a_batch() -> None:
    RECORDER.clear()
    RECORDER.refuses = True
    with pytest.raises(MemoryError):
        dist.batch_isend_irecv(batch()[0][1:])
    assert RECORDER.calls == ["start on meta", "drop"]
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [float(SIZE)] * 3


def check_a_function_that_another_library_has_wrapped_is_wrapped_again() -> None:
    calls, original = [], dist.batch_isend_irecv

    def wrapper(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        calls.append(len(p2p_op_list))
        return original(p2p_op_list)

    dist.batch_isend_irecv = wrapper
    try:
        install_batches()
        install_batches()
        RECORDER.clear()
        assert len(dist.batch_isend_irecv(batch()[0][1:2])) == 1
        with pytest.raises(ValueError, match="p2p_op_list"):
            dist.batch_isend_irecv([3])
        assert calls == [1]
    finally:
        dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = original


def check_torchs_function_is_the_same_object_and_keeps_its_errors() -> None:
    function = dist.batch_isend_irecv
    assert pickle.loads(pickle.dumps(function)) is function is dist.distributed_c10d.batch_isend_irecv
    for wrong in ({}, [3]):
        with pytest.raises(ValueError, match="p2p_op_list"):
            function(wrong)


def run_on_rank(environment: RankEnvironment) -> Outcomes:
    torch.set_num_threads(1)
    with environment.communicator() as communicator:
        store = RendezvousStore(environment.rendezvous, timeout_s=TIMEOUT_S)
        with default_group(SparkdlProcessGroup, communicator, store, RECORDER, TIMEOUT_S):
            return {name: outcome_of(globals()[name], communicator.rank) for name in checks_in(__name__)}
