"""Results of the collectives."""

from __future__ import annotations

import warnings

import pytest
import torch

import sparkdl.horovod.torch as hvd
from sparkdl.errors import ParamError
from tests.collective.eventually import eventually

INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def check_ranks_know_their_places() -> None:
    assert hvd.is_initialized()
    assert hvd.size() == hvd.local_size() == 2
    assert hvd.rank() == hvd.local_rank()
    assert hvd.cross_rank() == 0
    assert hvd.cross_size() == 1
    assert hvd.is_homogeneous()


def check_the_native_core_stands_for_gloo() -> None:
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert not hvd.mpi_enabled()
    assert not hvd.ddl_built()
    assert not hvd.ccl_built()
    assert hvd.nccl_built() == 0 or hvd.nccl_built() > 20_000
    with pytest.raises(ValueError, match="MPI is not enabled"):
        hvd.mpi_threads_supported()


def check_allreduce_averages_by_default_and_keeps_its_argument() -> None:
    tensor = torch.arange(6.0).view(2, 3) * (hvd.rank() + 1)
    torch.testing.assert_close(hvd.allreduce(tensor, name="x"), torch.arange(6.0).view(2, 3) * 1.5)
    torch.testing.assert_close(tensor, torch.arange(6.0).view(2, 3) * (hvd.rank() + 1))


def check_allreduce_in_place_writes_to_its_argument() -> None:
    for tensor in (torch.full((3, 2), hvd.rank() + 1.0), torch.full((3, 2), hvd.rank() + 1.0).t()):
        assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
        assert (tensor == 3).all()


def check_allreduce_knows_every_operation_and_scales() -> None:
    own = torch.tensor([1.0, 4.0]) if hvd.rank() == 0 else torch.tensor([3.0, 2.0])
    expected = {hvd.Sum: [4, 6], hvd.Average: [2, 3], hvd.Min: [1, 2], hvd.Max: [3, 4], hvd.Product: [3, 8]}
    for op, values in expected.items():
        assert hvd.allreduce(own, op=op).tolist() == values
    assert hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0).tolist() == [8, 12]
    assert hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Average).tolist() == [0]
    assert hvd.allreduce(torch.tensor([-7 * hvd.rank()]), op=hvd.Average).tolist() == [-3]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert hvd.allreduce(own, average=False).tolist() == [4, 6]
    with pytest.warns(DeprecationWarning, match="replaced with `op`"):
        hvd.allreduce(own, average=True)
    with pytest.raises(ValueError, match="supersedes"):
        hvd.allreduce(own, average=True, op=hvd.Sum)
    with pytest.raises(ParamError, match="op=17"):
        hvd.allreduce(own, op=17)


def check_allreduce_takes_every_dtype_and_shape() -> None:
    for dtype in [*INTEGERS, *FLOATS]:
        assert (
            hvd.allreduce(torch.full((2, 3), hvd.rank() + 1).to(dtype), op=hvd.Sum).tolist() == [[3] * 3] * 2
        )
    assert hvd.allreduce(torch.tensor([hvd.rank() == 0, False]), op=hvd.Sum).tolist() == [True, False]
    assert hvd.allreduce(torch.tensor(float(hvd.rank()))).item() == 0.5
    assert hvd.allreduce(torch.empty(0, 4)).shape == (0, 4)
    every_second = torch.arange(10.0)[::2] * hvd.rank()
    assert hvd.allreduce(every_second, op=hvd.Sum).tolist() == [0, 2, 4, 6, 8]
    assert hvd.allreduce_(every_second, op=hvd.Sum).tolist() == [0, 2, 4, 6, 8]


def check_tensors_that_cannot_be_taken_are_named() -> None:
    with pytest.raises(ValueError, match=r"Tensor type torch\.ComplexFloatTensor is not supported\."):
        hvd.allreduce(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"Tensor type torch\.sparse\.FloatTensor is not supported\."):
        hvd.broadcast(torch.ones(2).to_sparse(), 0)
    bools = torch.tensor([True, hvd.rank() == 0])
    for average in (hvd.allreduce, hvd.reducescatter, lambda tensor: hvd.grouped_allreduce([tensor])):
        with pytest.raises(ValueError, match=r"Tensor type torch\.BoolTensor is not supported\."):
            average(bools)
    # The session is still usable after these errors.
    assert hvd.allreduce(bools, op=hvd.Product).tolist() == [True, False]


def check_half_compression_gives_back_the_dtype() -> None:
    reduced = hvd.allreduce(torch.full((4,), float(hvd.rank())), compression=hvd.Compression.fp16)
    assert reduced.dtype == torch.float32
    assert reduced.tolist() == [0.5] * 4


def check_handles_are_polled_and_synchronized_once() -> None:
    handles = [hvd.allreduce_async(torch.full((5,), float(i)), op=hvd.Sum) for i in range(3)]
    assert all(isinstance(handle, int) for handle in handles)
    for i, handle in reversed(list(enumerate(handles))):
        hvd.barrier()
        assert hvd.poll(handle)
        assert hvd.synchronize(handle).tolist() == [2.0 * i] * 5
        assert hvd.synchronize(handle) is None
        with pytest.raises(ValueError, match="was not created or has been cleared"):
            hvd.poll(handle)


def check_asynchronous_operations_run_without_being_waited_for() -> None:
    tensor = torch.full((3,), float(hvd.rank()))
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="unwatched")
    assert eventually(lambda: hvd.poll(handle), timeout_s=20.0)
    assert tensor.tolist() == [1.0] * 3


def check_grouped_allreduce_takes_several_dtypes() -> None:
    own = [torch.full((2,), 1.0 + hvd.rank()), torch.tensor([hvd.rank()]), torch.ones(3).double()]
    reduced = hvd.grouped_allreduce(own, op=hvd.Sum)
    assert [tensor.tolist() for tensor in reduced] == [[3, 3], [1], [2, 2, 2]]
    assert own[1].tolist() == [hvd.rank()]
    in_place = hvd.grouped_allreduce_(own, op=hvd.Sum, name="group")
    assert isinstance(in_place, tuple)
    assert in_place[0] is own[0]
    assert own[1].tolist() == [1]
    outputs = hvd.synchronize(hvd.grouped_allreduce_async(own, op=hvd.Max))
    assert isinstance(outputs, tuple)
    assert hvd.synchronize(hvd.grouped_allreduce_async_(own, op=hvd.Max))[2] is own[2]
    assert hvd.grouped_allreduce([], op=hvd.Sum) == []
    with pytest.raises(hvd.HorovodInternalError, match="must be on same device"):
        hvd.grouped_allreduce([torch.ones(1), torch.ones(1, device="meta")])


def check_allgather_joins_unequal_first_dimensions() -> None:
    own = torch.full((hvd.rank() + 1, 2), hvd.rank(), dtype=torch.int16)
    assert hvd.allgather(own).tolist() == [[0, 0], [1, 1], [1, 1]]
    assert hvd.allgather(torch.empty(0 if hvd.rank() == 0 else 1, 2)).shape == (1, 2)
    assert hvd.allgather(torch.empty(0, 5)).shape == (0, 5)
    assert hvd.allgather(own.t().contiguous().t()).tolist() == [[0, 0], [1, 1], [1, 1]]
    both = hvd.grouped_allgather([own, torch.tensor([True] * 2)])
    assert isinstance(both, tuple)
    assert [tuple(tensor.shape) for tensor in both] == [(3, 2), (4,)]
    assert both[1].dtype == torch.bool
    with pytest.raises(hvd.HorovodInternalError, match="rank-zero tensor"):
        hvd.allgather(torch.tensor(1.0))


def check_broadcast_gives_the_roots_tensor() -> None:
    own = torch.full((2, 2), hvd.rank() == 1)
    assert hvd.broadcast(own, root_rank=1).all()
    assert bool(own.all()) == (hvd.rank() == 1)
    assert hvd.broadcast_(own.t(), 1).all()
    assert hvd.broadcast_(own, 1) is own
    assert own.all()
    with pytest.raises(ValueError, match="broadcast received invalid root rank 7"):
        hvd.broadcast(own, 7)


def check_alltoall_sends_equal_or_given_splits() -> None:
    rank = hvd.rank()
    own = torch.arange(4).view(4, 1).repeat(1, 2) + 10 * rank
    assert hvd.alltoall(own)[:, 0].tolist() == [2 * rank, 2 * rank + 1, 10 + 2 * rank, 11 + 2 * rank]
    received, splits = hvd.alltoall(own, splits=[1, 2] if rank == 0 else [0, 1])
    assert splits.tolist() == ([1, 0] if rank == 0 else [2, 1])
    assert received[:, 0].tolist() == ([0] if rank == 0 else [1, 2, 10])
    output, splits = hvd.synchronize(hvd.alltoall_async(own.float(), torch.tensor([2, 2], dtype=torch.int32)))
    assert output.shape == (4, 2)
    assert splits.dtype == torch.int32
    for wrong_splits, message in (
        ([[1, 1]], "1D splits"),
        (torch.ones(2), "32-bit integer"),
        ([1], "Number of entries"),
        ([3, 3], "Sum of splits"),
        ([3, -1], "negative"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.alltoall(own, splits=wrong_splits)
    with pytest.raises(ValueError, match="not an even multiple"):
        hvd.alltoall(own[:3])


def check_reducescatter_gives_the_first_ranks_more_rows() -> None:
    own = torch.arange(5.0).view(5, 1) * (hvd.rank() + 1)
    expected = [[0], [3], [6]] if hvd.rank() == 0 else [[9], [12]]
    assert hvd.reducescatter(own, op=hvd.Sum).tolist() == expected
    halves = hvd.reducescatter(own, prescale_factor=2.0, postscale_factor=0.5)
    assert halves.tolist() == [[value / 2 for value in row] for row in expected]
    first, second = hvd.grouped_reducescatter([own, torch.ones(2, dtype=torch.int32)], op=hvd.Sum)
    assert (first.tolist(), second.tolist()) == (expected, [2])
    several = [own, torch.ones(2, dtype=torch.int32), own[:0], torch.ones(2, 6)[:, ::2].t()]
    blocks = hvd.grouped_reducescatter(several, op=hvd.Sum)
    assert [block.tolist() for block in blocks] == [expected, [2], [], [[2, 2]] * (2 - hvd.rank())]
    with pytest.raises(ValueError, match="scalar"):
        hvd.reducescatter(torch.tensor(1.0))
    with pytest.raises(hvd.HorovodInternalError, match="only supports AVERAGE and SUM"):
        hvd.reducescatter(own, op=hvd.Max)


def check_tensors_of_one_element_or_none_may_have_any_stride() -> None:
    rank = hvd.rank()
    column = torch.arange(10.0).view(1, 10)[:, rank]
    assert (column.is_contiguous(), column.stride()) == (True, (10,))
    # Each call of these runs more than one operation; none may end the session.
    assert hvd.allgather(column).tolist() == [0, 1]
    assert [gathered.tolist() for gathered in hvd.grouped_allgather([column, column])] == [[0, 1], [0, 1]]
    assert hvd.broadcast(column, 1).tolist() == [1]
    assert hvd.broadcast_(column.clone().view(1, 1)[:, 0], 1).tolist() == [1]
    received, _ = hvd.alltoall(column, splits=[0, 1] if rank == 0 else [1, 0])
    assert received.tolist() == [1 - rank]
    assert hvd.allgather(torch.ones(()).expand(1)).tolist() == [1, 1]
    assert hvd.allgather(torch.zeros(0, 10)[:, 0]).shape == (0,)
    assert hvd.broadcast_(torch.zeros(0, 10)[:, 0], 0).shape == (0,)
    assert hvd.allreduce(column, op=hvd.Sum).tolist() == [1]


def check_tensors_that_cannot_hold_a_result_are_refused_at_the_call() -> None:
    shared = torch.ones(1).expand(4)
    for call in (
        lambda: hvd.broadcast_(shared, 0),
        lambda: hvd.allreduce_(shared),
        lambda: hvd.grouped_allreduce_([torch.ones(1), shared]),
    ):
        with pytest.raises(ValueError, match=r"shape \(4,\) and strides \(0,\).*contiguous"):
            call()
    for call in (
        lambda: hvd.allreduce(torch.ones(2, device="meta")),
        lambda: hvd.allreduce_(torch.eye(2).to_sparse()),
        lambda: hvd.grouped_allreduce_([torch.eye(2).to_sparse()]),
        lambda: hvd.broadcast_(torch.eye(2).to_sparse(), 0),
    ):
        with pytest.raises(ValueError, match="not supported"):
            call()
    assert hvd.allreduce(shared, op=hvd.Sum).tolist() == [2] * 4


def check_an_operation_refused_on_one_rank_leaves_the_numbers_of_the_next_alike() -> None:
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="Number of entries"):
            hvd.alltoall(torch.ones(2), splits=[1])
        with pytest.raises(ValueError, match="invalid root rank 9"):
            hvd.broadcast(torch.ones(2), 9)
    assert hvd.alltoall(torch.full((2,), float(hvd.rank()))).tolist() == [0, 1]
    assert hvd.broadcast(torch.tensor([hvd.rank()]), 1).item() == 1


def check_sparse_allreduce_equals_the_dense_one() -> None:
    dense = torch.zeros(6, 2)
    dense[hvd.rank() : hvd.rank() + 3] = 1.0 + hvd.rank()
    handle = hvd.sparse_allreduce_async(dense.to_sparse(1), name="sparse", op=hvd.Average)
    torch.testing.assert_close(handle().to_dense(), hvd.allreduce(dense))
    one = torch.ones(1, 2).to_sparse(1)
    assert hvd.sparse_allreduce_async(one, name="one", op=hvd.Sum)().to_dense().tolist() == [[2, 2]]
    nothing = torch.zeros(3, 2).to_sparse(1)
    assert hvd.sparse_allreduce_async(nothing, name="nothing", op=hvd.Sum)()._nnz() == 0


def check_adasum_adds_what_is_orthogonal_and_averages_what_is_parallel() -> None:
    rank = hvd.rank()
    for dtype in (torch.float16, torch.float32, torch.float64):
        orthogonal = torch.tensor([3.0, 0.0, 0.0] if rank == 0 else [0.0, 0.0, 5.0]).to(dtype)
        assert hvd.allreduce(orthogonal, op=hvd.Adasum).tolist() == [3, 0, 5]
        parallel = torch.tensor([2.0, 4.0]).to(dtype) * (1 + 2 * rank)
        assert hvd.allreduce(parallel, op=hvd.Adasum).tolist() == [4, 8]
    both = hvd.grouped_allreduce([torch.ones(1), torch.eye(2)[rank]], op=hvd.Adasum)
    assert [tensor.tolist() for tensor in both] == [[1], [1, 1]]
    assert hvd.allreduce(torch.zeros(3), op=hvd.Adasum).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="IntTensor"):
        hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Adasum)


def check_tensors_on_the_cpu_are_served_whatever_the_default_device_is() -> None:
    rank = hvd.rank()
    rows, pair = torch.full((rank + 1, 2), float(rank)), torch.tensor([1.0, rank])
    with torch.device("meta"):  # as torch.set_default_device("cuda")
        assert hvd.allreduce(pair, op=hvd.Sum).tolist() == [2.0, 1.0]
        assert hvd.allreduce(pair, op=hvd.Adasum).device.type == "cpu"
        assert hvd.allgather(rows).tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
        received, splits = hvd.alltoall(pair, splits=[1, 1])
        assert (received.tolist(), splits.tolist()) == ([1.0, 1.0] if rank == 0 else [0.0, 1.0], [1, 1])
        assert hvd.reducescatter(pair, op=hvd.Sum).tolist() == [[2.0], [1.0]][rank]
        assert hvd.broadcast_object({"rank": rank}, root_rank=1) == {"rank": 1}
        assert hvd.allgather_object(rank) == [0, 1]
