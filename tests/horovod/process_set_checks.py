"""Process sets among three ranks: dynamic, overlapping, and used by several threads concurrently."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import sparkdl.horovod.torch as hvd
from sparkdl.errors import ParamError
from sparkdl.horovod.torch.current_session import session
from tests.horovod.worlds import again_with
from tests.torch.training_examples import batch, loss_of, model


def check_process_sets_can_be_added_and_removed() -> None:
    for _ in range(3):
        pair = hvd.add_process_set([2, 0])
        assert pair.ranks == [0, 2]
        assert pair.size() == 2
        assert pair.included() == (hvd.rank() != 1)
        if hvd.rank() == 1:
            with pytest.raises(ValueError, match="Process is not part of provided process set"):
                pair.rank()
        else:
            assert pair.rank() == hvd.rank() // 2
            assert hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Sum, process_set=pair).item() == 2
        with pytest.raises(ValueError, match="duplicate process set"):
            hvd.add_process_set([0, 2])
        assert hvd.remove_process_set(pair)
        assert pair.process_set_id is None
        assert pair.size() is None
        assert pair.rank() is None
        assert not hvd.remove_process_set(pair)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match="cannot have ranks"):
        hvd.add_process_set([0, 7])


def check_process_sets_are_given_as_rules_for_a_number_of_ranks() -> None:
    pair = hvd.add_process_set([0, 2])
    evens = hvd.add_process_set(hvd.ProcessSet(lambda size: range(0, size, 2)))
    assert evens.ranks == [0, 2]
    assert evens.process_set_id == pair.process_set_id  # the same ranks
    assert hvd.remove_process_set(evens)
    if pair.included():  # it was not removed with the other one
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2
    assert hvd.remove_process_set(pair)
    everyone = hvd.add_process_set(hvd.ProcessSet(range))
    assert everyone.process_set_id == 0
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=everyone).item() == 3
    nobody = hvd.add_process_set(hvd.ProcessSet(lambda size: range(3, size)))
    assert nobody.included() is False
    assert nobody.size() is None
    with pytest.raises(ValueError, match="does not exist, or has not been registered"):
        hvd.allreduce(torch.ones(1), process_set=nobody)
    with pytest.raises(ValueError, match="a function that returns them"):
        hvd.add_process_set(hvd.ProcessSet(lambda size: ["0"]))  # type: ignore[list-item]
    wrong = hvd.ProcessSet(lambda size: [hvd.rank()])
    with pytest.raises(hvd.HorovodInternalError, match="another rank asked to"):
        hvd.add_process_set(wrong)


def check_ranks_that_ask_for_different_process_sets_are_told_who_asked_for_which() -> None:
    sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2]), hvd.ProcessSet([1, 2])]
    message = (
        r"One rank asked to add process set \[0, 1\], but another rank asked to add process set \[1, 2\]\. "
        r"\(rank 0: .*\[0, 1\]; rank 1: .*\[1, 2\]; rank 2: .*\[1, 2\]\)"
    )
    with pytest.raises(hvd.HorovodInternalError, match=message):
        hvd.add_process_set(sets[hvd.rank()])
    assert sets[hvd.rank()].process_set_id is None
    pairs = [hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])]
    with pytest.raises(hvd.HorovodInternalError, match=r"asked to remove process set .* of ranks \[1, 2\]"):
        hvd.remove_process_set(pairs[1 if hvd.rank() == 2 else 0])
    for pair in pairs:
        if pair.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2
        assert hvd.remove_process_set(pair)


def check_process_sets_do_not_change_while_a_rank_has_joined() -> None:
    pair = hvd.add_process_set([0, 1])
    if hvd.rank() != 0:
        message = r"process sets is not supported with Join at this time\. \(joined: rank 0\)"
        with pytest.raises(hvd.HorovodInternalError, match=message):
            hvd.add_process_set([0, 2])
        with pytest.raises(hvd.HorovodInternalError, match=message):
            hvd.remove_process_set(pair)
    hvd.join()
    other = hvd.add_process_set([0, 2])
    if other.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=other).item() == 2
    assert hvd.remove_process_set(other)
    assert hvd.remove_process_set(pair)


def check_ranks_outside_get_an_error_that_says_so() -> None:
    alone = hvd.add_process_set(hvd.ProcessSet([1]))
    if hvd.rank() != 1:
        for call, name in (
            (lambda: hvd.allreduce(torch.ones(1), process_set=alone), "Allreduce"),
            (lambda: hvd.grouped_allreduce([torch.ones(1)], process_set=alone), "Allreduce"),
            (lambda: hvd.allgather(torch.ones(1), process_set=alone), "Allgather"),
            (lambda: hvd.broadcast(torch.ones(1), 1, process_set=alone), "Broadcast"),
            (lambda: hvd.alltoall(torch.ones(1), process_set=alone), "Alltoall"),
            (lambda: hvd.reducescatter(torch.ones(1), process_set=alone), "Reducescatter"),
            (lambda: hvd.barrier(alone), "Barrier"),
        ):
            with pytest.raises(
                ValueError, match=f"{name}: Rank {hvd.rank()} is not a member of the provided process set"
            ):
                call()
    else:
        with pytest.raises(NotImplementedError, match="Adasum does not support non-global process sets"):
            hvd.allreduce(torch.ones(1), op=hvd.Adasum, process_set=alone)
    hvd.remove_process_set(alone)
    with pytest.raises(ValueError, match="does not exist, or has not been registered"):
        hvd.allreduce(torch.ones(1), process_set=alone)
    with pytest.raises(NotImplementedError, match="non-power of 2"):
        hvd.allreduce(torch.ones(1), op=hvd.Adasum)


def check_every_collective_runs_in_a_process_set() -> None:
    pair = hvd.add_process_set([1, 2])
    if pair.included():
        place = pair.rank()
        own = torch.full((2,), float(hvd.rank()))
        assert hvd.allreduce(own, process_set=pair).tolist() == [1.5, 1.5]
        assert hvd.allgather(own[: place + 1], process_set=pair).tolist() == [1, 2, 2]
        assert hvd.broadcast(own, 2, process_set=pair).tolist() == [2, 2]
        with pytest.raises(ValueError, match="invalid root rank 0 for provided process set"):
            hvd.broadcast(own, 0, process_set=pair)
        assert hvd.alltoall(own, process_set=pair).tolist() == [1, 2]
        assert hvd.reducescatter(own, op=hvd.Sum, process_set=pair).tolist() == [3]
        assert hvd.broadcast_object(hvd.rank(), 1, process_set=pair) == 1
        assert hvd.allgather_object(hvd.rank(), process_set=pair) == [1, 2]
        x = torch.ones(1 + place, requires_grad=True)
        (hvd.allgather(x, process_set=pair) * torch.arange(3.0)).sum().backward()
        assert x.grad.tolist() == ([0.0] if place == 0 else [1.0, 2.0])
        hvd.barrier(pair)
    hvd.remove_process_set(pair)


def check_overlapping_sets_run_at_once_from_several_threads() -> None:
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2], [0, 2])] + [hvd.global_process_set]

    def run(process_set: hvd.ProcessSet) -> None:
        members = process_set.ranks
        for step in range(30):
            own = torch.full((1 + step,), float(hvd.rank()))
            reduced = hvd.allreduce(own, name="same name", op=hvd.Sum, process_set=process_set)
            assert reduced.tolist() == [float(sum(members))] * (1 + step)
            rows = hvd.allgather(own[: 1 + hvd.rank()], process_set=process_set)
            assert rows.numel() == sum(min(1 + step, 1 + rank) for rank in members)

    mine = [process_set for process_set in sets if process_set.included()]
    with ThreadPoolExecutor(len(mine)) as pool:
        list(pool.map(run, mine[:: 1 if hvd.rank() else -1]))  # raises what a thread raised
    for process_set in sets[:3]:
        hvd.remove_process_set(process_set)


def check_removal_fails_what_is_outstanding_in_the_set() -> None:
    pair = hvd.add_process_set([0, 1])
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="never matched", process_set=pair)
    hvd.remove_process_set(pair)
    if hvd.rank() == 0:
        with pytest.raises(hvd.HorovodInternalError, match="shut down"):
            hvd.synchronize(handle)
    hvd.barrier()


def check_an_optimizer_may_serve_one_process_set() -> None:
    pair = hvd.add_process_set([0, 2])
    module = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1), process_set=pair, groups=2
    )
    loss_of(module, batch(hvd.rank(), 0)).backward()
    optimizer.step()
    weights = hvd.allgather_object(module.state_dict()["0.weight"])
    torch.testing.assert_close(weights[0], weights[2])
    assert not torch.allclose(weights[0], weights[1])
    with pytest.raises(NotImplementedError, match="Adasum does not support non-global process sets"):
        hvd.DistributedOptimizer(torch.optim.SGD(module.parameters()), op=hvd.Adasum, process_set=pair)
    hvd.remove_process_set(pair)


def check_two_ranks_mismatch_and_the_third_hears_of_it_too() -> None:
    with pytest.raises(hvd.HorovodInternalError, match="rank 0: .*; rank 1: .*; rank 2: ") as caught:
        hvd.allreduce(torch.ones(2 if hvd.rank() == 1 else 3), name="of three")
    assert len(set(hvd.allgather_object(str(caught.value)))) == 1


def check_the_last_of_three_to_join_is_returned() -> None:
    for step in range(3):
        if hvd.rank() > 0:
            assert hvd.allreduce(torch.ones(1), name=f"{step} without 0", op=hvd.Sum).item() == 2
        if hvd.rank() == 2:
            assert hvd.allreduce(torch.ones(1), name=f"{step} without 0 and 1", op=hvd.Sum).item() == 1
        assert hvd.join() == 2


def check_a_stall_ends_a_rank_that_has_joined_too() -> None:
    with (
        again_with(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="1"),
        pytest.raises(hvd.HorovodInternalError, match="allreduce.of 0 stalled for 1 s: rank 1 did not ask"),
    ):
        if hvd.rank() == 2:
            hvd.join()
        else:
            hvd.allreduce(torch.ones(1), name=f"of {hvd.rank()}")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3


def check_a_process_set_of_an_earlier_world_is_refused_by_everything_that_takes_one() -> None:
    old = hvd.add_process_set([0, 1])
    module = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), process_set=old)
    hvd.shutdown()
    with pytest.raises(ValueError, match="has not been initialized"):
        old.size()
    with pytest.raises(hvd.HorovodInternalError, match="has not been initialized"):
        hvd.allreduce(torch.ones(1), process_set=old)
    hvd.init()
    new = hvd.add_process_set([1, 2])
    assert new.process_set_id == old.process_set_id, "else this proves nothing"
    ones = torch.ones(3)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (3,), check_invariants=False)
    in_place = (hvd.allreduce_, hvd.allreduce_async_)
    groups = (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allgather, hvd.grouped_reducescatter)
    calls = [
        *((call, ones) for call in (hvd.allreduce, hvd.allreduce_async, *in_place)),
        *((call, ones) for call in (hvd.allgather, hvd.alltoall, hvd.reducescatter)),
        *((call, [ones]) for call in groups),
        *((call, ones, 0) for call in (hvd.broadcast, hvd.broadcast_, hvd.broadcast_object)),
        (hvd.allreduce, ones.clone().requires_grad_()),
        (hvd.sparse_allreduce_async, sparse, "sparse", hvd.Sum),
        (hvd.allgather_object, 1),
        (hvd.barrier,),
        (hvd.remove_process_set,),
        (hvd.DistributedOptimizer, torch.optim.SGD(module.parameters(), lr=0.1)),
    ]
    for of_before in (old, copy.deepcopy(old), pickle.loads(pickle.dumps(old))):
        for use in (
            *(partial(*call, process_set=of_before) for call in calls),
            of_before.rank,
            of_before.size,
            of_before.included,
            optimizer.synchronize,
            optimizer.step,
        ):
            with pytest.raises(ValueError, match=r"world that hvd\.shutdown\(\) has ended, .* again\."):
                use()
    own = torch.tensor([10.0 ** hvd.rank()])
    assert hvd.allreduce(own, op=hvd.Sum).item() == 111
    if new.included():
        assert hvd.allreduce(own, op=hvd.Sum, process_set=new).item() == 110
    assert hvd.add_process_set(old) is old
    if old.included():
        assert hvd.allreduce(own, op=hvd.Sum, process_set=old).item() == 11
    assert hvd.remove_process_set(old)
    assert hvd.remove_process_set(new)


def check_process_sets_given_to_init_come_back_after_an_elastic_reset_and_others_do_not() -> None:
    hvd.shutdown()
    static = [hvd.ProcessSet([1, 2]), hvd.ProcessSet([0, 2]), hvd.ProcessSet([0])]
    hvd.init(process_sets=static)
    alias = hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[alias])
    dynamic = hvd.add_process_set([0, 1])
    assert hvd.remove_process_set(static[2])
    sums: list[Any] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < 4:
            own = torch.tensor([10.0 ** hvd.rank()])
            mine = [ps for ps in (*static[:2], alias, hvd.global_process_set) if ps.included()]
            sums.extend((str(ps.ranks), hvd.allreduce(own, op=hvd.Sum, process_set=ps).item()) for ps in mine)
            if state.step in (1, 2) and state.num_resets < state.step:
                if hvd.rank() == 1:
                    session().world.abort("a failure for the test")
                hvd.barrier()
            state.step += 1
            state.commit()

    def note_reset() -> None:
        state.num_resets += 1
        for gone in (dynamic, static[2]):
            if gone.process_set_id is not None:
                with pytest.raises(ValueError, match="has ended"):
                    hvd.barrier(gone)
        other = hvd.add_process_set([0, 1])
        assert other.process_set_id not in [process_set.process_set_id for process_set in static[:2]]
        if other.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=other).item() == 2

    class State(hvd.elastic.ObjectState):
        num_resets = 0

    state = State(hvd.broadcast_object, hvd.rank, step=0)
    state.register_reset_callbacks([note_reset])
    train(state)
    assert state.num_resets == 2
    assert set(sums) <= {("[1, 2]", 110.0), ("[0, 2]", 101.0), ("[0, 1, 2]", 111.0)}
    assert len(sums) == 6 * sum([1, 2 * static[0].included(), static[1].included()])
    assert [(ps.process_set_id, ps.size()) for ps in (*static[:2], alias)] == [(1, 2), (2, 2), (1, 2)]
    assert static[2].size() is None
    hvd.shutdown()
    hvd.init()
    with pytest.raises(ValueError, match="has ended"):
        static[0].size()


def check_an_elastic_reset_is_of_the_ranks_that_init_was_given() -> None:
    me = hvd.rank()
    hvd.shutdown()
    if me != 1:
        pair = hvd.ProcessSet([1])
        hvd.init([0, 2], process_sets=[pair])
        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank)
        resets: list[int] = []
        state.register_reset_callbacks([lambda: resets.append(hvd.size())])

        @hvd.elastic.run
        def train(state: Any) -> tuple[int, float]:
            if not resets:
                session().world.abort("a failure for the test")
            return hvd.size(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

        assert train(state) == (2, 2.0)
        assert resets == [2]
        assert pair.included() == (me == 2)
        hvd.shutdown()
    hvd.init()
    assert hvd.size() == 3


def check_what_is_wrong_with_the_process_sets_of_one_rank_is_told_to_all_of_them() -> None:
    me = hvd.rank()
    good = [hvd.ProcessSet([0]), hvd.ProcessSet([1, 2])]
    hvd.shutdown()
    duplicates = [hvd.ProcessSet([0]), hvd.ProcessSet([1, 2]), hvd.ProcessSet([2, 1])]
    everyone = [hvd.ProcessSet([0, 1, 2])]
    for process_sets, said in (
        (duplicates, r"entry number 2 is a duplicate: ProcessSet\(.*ranks=\[1, 2\].*\) \(rank 1\)"),
        (everyone, r"entry number 0 is a duplicate: .* \(rank 1\)"),
        ([hvd.global_process_set], r"entry number 0 is a duplicate: .* \(rank 1\)"),
        ([hvd.ProcessSet([0, 3])], r"cannot have ranks \[0, 3\]: they must be .* within 0 to 2 \(rank 1\)"),
        ([hvd.ProcessSet([0, 0])], r"cannot have ranks \[0, 0\]: they must be distinct"),
        ([hvd.ProcessSet([])], r"cannot have ranks \[\]: there must be at least one \(rank 1\)"),
        ([good[0], [1, 2]], r"entry number 1 is a list instead of a hvd.ProcessSet: \[1, 2\] \(rank 1\)"),
        (7, r"entry number 0 is a int instead of a hvd.ProcessSet: 7 \(rank 1\)"),
        ("static", r"process_sets='static' names no process sets; .*'dynamic' \(rank 1\)"),
        (good[:1], r"different process_sets: ranks 0, 2: \[\[0\], \[1, 2\]\]; rank 1: \[\[0\]\]\. Give all"),
        (good[::-1], r"ranks 0, 2: \[\[0\], \[1, 2\]\]; rank 1: \[\[1, 2\], \[0\]\]\. .* in the same order"),
    ):
        with pytest.raises(ParamError, match=f"could not be initialized because .*{said}"):
            hvd.init(process_sets=process_sets if me == 1 else good)
        assert not hvd.is_initialized()
    hvd.init(process_sets=iter(good))
    assert [ps.size() for ps in good] == [1, 2]
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3
    if me > 0:
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=good[1]).item() == 2
    hvd.shutdown()
    hvd.init()


def check_a_process_set_that_one_rank_cannot_add_is_an_error_on_all_of_them() -> None:
    pair = hvd.add_process_set([0, 1])
    for wrong, said in (
        ([0, 7], r"add process set \[0, 7\]"),
        ([0, 1], r"add process set \[0, 1\]"),
        ([], r"add process set \[\]"),
        (["a"], "add no process set .ValueError: ProcessSet should be"),
        (5, "add no process set .ValueError: ProcessSet should be"),
    ):
        with pytest.raises(hvd.HorovodInternalError, match=f"asked to {said}.*rank 2"):
            hvd.add_process_set(wrong if hvd.rank() == 0 else [1, 2])
        with pytest.raises(ValueError, match="cannot have ranks|duplicate|should be initialized"):
            hvd.add_process_set(wrong)
    other = hvd.add_process_set([1, 2])
    if other.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=other).item() == 2
    assert hvd.remove_process_set(other)
    assert hvd.remove_process_set(pair)
