"""Ranks that run out of data."""

from __future__ import annotations

import pytest
import torch

import sparkdl.horovod.torch as hvd


def check_joined_ranks_give_zeros() -> None:
    for first in (0, 1):
        if hvd.rank() != first:
            assert hvd.allreduce(torch.full((3,), 4.0), name="j").tolist() == [2.0] * 3
            assert hvd.allreduce(torch.full((3,), 5), name="integers").tolist() == [2] * 3
            assert hvd.allreduce(torch.full((3,), 4.0), name="sum", op=hvd.Sum).tolist() == [4.0] * 3
            group = hvd.grouped_allreduce([torch.ones(2), torch.ones(3), torch.ones(1).int()], op=hvd.Sum)
            assert [tensor.tolist() for tensor in group] == [[1, 1], [1, 1, 1], [1]]
            hvd.barrier()
        assert hvd.join() == 1 - first


def check_adasum_takes_joined_ranks_for_zeros() -> None:
    own = torch.tensor([[3.0, -4.0], [0.5, 2.0]])
    for first in (0, 1):
        if hvd.rank() != first:
            assert hvd.allreduce(own, name="adasum", op=hvd.Adasum).tolist() == own.tolist()
            group = [own.bfloat16(), own.t(), torch.tensor(2.0).double(), torch.ones(0)]
            reduced = hvd.grouped_allreduce(group, op=hvd.Adasum)
            assert [tensor.tolist() for tensor in reduced] == [tensor.tolist() for tensor in group]
        hvd.join()


def check_what_needs_all_ranks_fails_while_one_has_joined() -> None:
    tensor = torch.ones(4)
    if hvd.rank() == 0:
        for call, message in (
            (lambda: hvd.allgather(tensor), "Allgather is not supported with Join at this time"),
            (lambda: hvd.alltoall(tensor), "Alltoall is not supported with Join at this time"),
            (lambda: hvd.broadcast(tensor, 0), "Broadcast is not supported with Join at this time"),
            (lambda: hvd.reducescatter(tensor), "Reducescatter is not supported with Join at this time"),
        ):
            with pytest.raises(hvd.HorovodInternalError, match=message) as caught:
                call()
            assert "rank 1" in str(caught.value)
        assert hvd.allreduce(tensor, op=hvd.Sum).tolist() == [1.0] * 4
    hvd.join()
    assert hvd.allgather(tensor).shape == (8,)


def check_unnamed_operations_match_again_after_a_join() -> None:
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(1))
        hvd.allreduce(torch.ones(1))
    hvd.join()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


def check_what_was_asked_before_joining_still_runs() -> None:
    if hvd.rank() == 0:
        late = hvd.allreduce_async(torch.ones(2), name="late", op=hvd.Sum)
        hvd.join()
        assert hvd.synchronize(late).tolist() == [2.0] * 2
    else:
        # Rank 0 cannot have joined before "late" has run; it contributes zeros here nevertheless.
        assert hvd.allreduce(torch.ones(3), name="meanwhile", op=hvd.Sum).tolist() == [1.0] * 3
        assert hvd.allreduce(torch.ones(3), name="adasum", op=hvd.Adasum).tolist() == [1.0] * 3
        hvd.barrier()
        assert hvd.allreduce(torch.ones(2), name="late", op=hvd.Sum).tolist() == [2.0] * 2
        hvd.join()


def check_what_only_a_joining_rank_asked_runs_with_zeros() -> None:
    if hvd.rank() == 0:
        alone = hvd.allreduce_async(torch.ones(2), name="alone", op=hvd.Sum)
        gathered = hvd.allgather_async(torch.ones(2), name="gathered")
    hvd.join()
    if hvd.rank() == 0:
        assert hvd.synchronize(alone).tolist() == [1.0] * 2
        with pytest.raises(hvd.HorovodInternalError, match="Allgather is not supported with Join"):
            hvd.synchronize(gathered)
