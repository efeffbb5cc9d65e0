"""Making ranks equal and keeping them so: parameters, optimizer state, objects, elastic state, batch statistics."""

from __future__ import annotations

import pickle
import threading
from collections import namedtuple
from typing import Any

import pytest
import torch

import sparkdl.horovod.torch as hvd
from sparkdl.errors import ParamError
from sparkdl.horovod.torch.current_session import session
from sparkdl.horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry
from tests.torch.training_examples import batch, loss_of, model


def check_objects_travel() -> None:
    assert hvd.broadcast_object({"a": [1, 2]} if hvd.rank() == 1 else None, root_rank=1) == {"a": [1, 2]}
    assert hvd.broadcast_object("b", name="named") == "b"
    assert hvd.allgather_object("x" * hvd.rank()) == ["", "x"]


def check_parameters_become_the_roots() -> None:
    for form in ("state_dict", "named_parameters", "parameters"):
        module = model()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(hvd.rank())
        given = getattr(module, form)()
        hvd.broadcast_parameters(given if form == "state_dict" else list(given), root_rank=0)
        for mine, expected in zip(module.parameters(), model().parameters(), strict=True):
            torch.testing.assert_close(mine, expected)
    with pytest.raises(ValueError, match="invalid params"):
        hvd.broadcast_parameters(3, 0)
    module.register_buffer("positions", torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match="positions is of layout torch.sparse_coo"):
        hvd.broadcast_parameters(module.state_dict(), root_rank=0)


def check_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(ParamError, match="The state's lock is a lock, which cannot be pickled"):
        hvd.elastic.TorchState(epoch=1, lock=threading.Lock()).sync()
    own = threading.Lock() if hvd.rank() == 1 else 1
    for send in (lambda: hvd.broadcast_object(own, root_rank=1), lambda: hvd.allgather_object(own)):
        with pytest.raises(
            TypeError if hvd.rank() == 1 else pickle.PicklingError,
            match="cannot pickle" if hvd.rank() == 1 else "Rank 1 .*could not pickle its object",
        ):
            send()
    assert hvd.allgather_object(hvd.rank()) == [0, 1]


def check_optimizer_state_becomes_the_roots() -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5 if hvd.rank() == 0 else 0.1)
    if hvd.rank() == 0:
        loss_of(module, batch(0, 0)).backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.5
    states = hvd.allgather_object(
        {key: value["exp_avg"] for key, value in optimizer.state_dict()["state"].items()}
    )
    assert len(states[1]) == len(list(module.parameters()))
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value)
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(module.parameters()), 0)


Moments = namedtuple("Moments", ["first", "second"])


class NestedOptimizer(torch.optim.SGD):
    """An optimizer with a state of a structure of its own, different on each rank."""

    def state_dict(self) -> dict[str, Any]:
        rank = float(hvd.rank())
        moments = Moments(torch.full((2,), rank), [torch.full((3,), rank), rank])
        return {"state": {"moments": moments, "step": rank}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict["state"]


def check_nested_optimizer_state_keeps_its_structure() -> None:
    optimizer = NestedOptimizer([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    if hvd.rank() == 0:
        moments = optimizer.loaded["moments"]
        assert isinstance(moments, Moments)
        assert [moments.first.tolist(), moments.second[0].tolist()] == [[1.0] * 2, [1.0] * 3]
        assert (moments.second[1], optimizer.loaded["step"]) == (1.0, 1.0)


def check_elastic_state_is_synchronized_committed_and_restored() -> None:
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1 * (1 + hvd.rank()), momentum=0.9)
    sampler = hvd.elastic.ElasticSampler(range(11))
    state = hvd.elastic.TorchState(module, optimizer, sampler=sampler, epoch=7 + hvd.rank())
    state.sync()
    assert state.epoch == 7
    assert optimizer.param_groups[0]["lr"] == 0.1
    torch.testing.assert_close(*hvd.allgather_object(module.weight.detach()))
    kept = module.weight.detach().clone()
    sampler.record_batch(0, 2)
    state.commit()
    state.epoch, module.weight.data[:] = 9, 0.0
    sampler.record_batch(1, 2)
    state.restore()
    assert state.epoch == 7
    assert sampler.processed_num == 4
    assert torch.equal(module.weight.detach(), kept)
    replacement = torch.nn.Linear(2, 1)
    state.model = replacement
    state.restore()
    assert state.model is replacement


class Tally:
    """A part of a state of a type that only this test defines."""

    def __init__(self, count: int) -> None:
        self.count = count


class TallyHandler(StateHandler):
    """Has its own attributes, which do not exist yet when the base class's constructor runs."""

    def __init__(self, value: Tally) -> None:
        super().__init__(value)
        self.kept: list[int] = []

    def save(self) -> None:
        self.kept.append(self.value.count)

    def restore(self) -> None:
        self.value.count = self.kept[-1]

    def sync(self) -> None:
        self.value.count = hvd.broadcast_object(self.value.count)
        self.save()


def check_handlers_for_other_kinds_of_parts_can_be_registered_for_a_while() -> None:
    before = get_handler_registry()
    kinds = list(before)
    set_handler_registry([*before, (Tally, TallyHandler)])
    try:
        state = hvd.elastic.TorchState(tally=Tally(5 + hvd.rank()))
        tally = state.tally
        state.sync()
        assert tally.count == 5
        tally.count = 8
        state.restore()
        assert tally.count == 5
    finally:
        set_handler_registry(before)
    assert get_handler_registry() == kinds


def check_elastic_samplers_divide_what_is_left() -> None:
    sampler = hvd.elastic.ElasticSampler(range(11), seed=3)
    shares = hvd.allgather_object(list(sampler))
    assert len(shares[0]) == len(shares[1]) == len(sampler) == 6
    assert set(shares[0]) | set(shares[1]) == set(range(11))
    used = {index for share in shares for index in share[:2]}
    sampler.record_batch(0, 2)
    sampler.load_state_dict(sampler.state_dict())
    left = {index for share in hvd.allgather_object(list(sampler)) for index in share}
    assert left == set(range(11)) - used
    sampler.set_epoch(1)
    assert sampler.processed_num == 0
    assert hvd.allgather_object(list(sampler)) != shares
    in_order = hvd.elastic.ElasticSampler(range(4), shuffle=False)
    assert list(in_order) == [hvd.rank(), hvd.rank() + 2]


def check_elastic_training_goes_on_from_the_last_commit_after_a_failure() -> None:
    history: list[tuple[int, float]] = []
    resets: list[int] = []

    @hvd.elastic.run
    def train(state: Any, num_steps: int) -> str:
        while state.step < num_steps:
            if state.step == 2 and not resets and hvd.rank() == 0:
                session().world.abort("a failure for the test")
            state.total += hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item()
            history.append((state.step, state.total))
            state.step += 1
            state.commit()
        return "done"

    state = hvd.elastic.TorchState(step=0, total=0.0)
    state.register_reset_callbacks([lambda: resets.append(state.step)])
    assert train(state, num_steps=4) == "done"
    assert resets == [2]
    assert history == [(0, 2.0), (1, 4.0), (2, 6.0), (3, 8.0)]


def check_elastic_training_raises_what_would_fail_again() -> None:
    attempts: list[str] = []

    @hvd.elastic.run
    def train(state: Any, how: str) -> None:
        attempts.append(how)
        if how == "code":
            raise hvd.HorovodInternalError("Horovod has been shut down.") from TypeError("of our own")
        if how == "commits" and len(attempts) < 6:
            state.commit()
        hvd.allreduce(torch.ones(1 + hvd.rank()), name="of two sizes")

    state = hvd.elastic.TorchState(step=0)
    with pytest.raises(hvd.HorovodInternalError, match="Horovod has been shut down") as caught:
        train(state, "code")
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
        train(state, "mismatch")
    assert attempts == ["code", "mismatch", "mismatch"]
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
        train(state, "commits")
    assert attempts[3:] == ["commits"] * 3


def check_states_of_users_may_be_as_bare_as_with_horovod() -> None:
    state = hvd.elastic.State(bcast_object=hvd.broadcast_object, get_rank=hvd.rank)
    for method in (state.save, state.restore, state.sync, state.commit):
        with pytest.raises(NotImplementedError):
            method()

    class Kept(hvd.elastic.State):
        def save(self) -> None:
            self.kept = self._bcast_object(self._rank())

    own = Kept(hvd.broadcast_object, hvd.rank)
    own.commit()
    assert own.kept == 0


def check_batch_norm_over_ranks_equals_that_of_one_process() -> None:
    for shape, options in (((6, 4), {}), ((6, 4, 3, 2), {"momentum": None}), ((6, 4, 5), {"affine": False})):
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(shape, generator=generator) * 3 + 100
        upstream = torch.randn(shape, generator=generator)
        kinds = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}
        reference, mine = kinds[len(shape)](4, **options), hvd.SyncBatchNorm(4, **options)
        own = slice(0, 2) if hvd.rank() == 0 else slice(2, 6)
        for _ in range(2):
            whole = rows.clone().requires_grad_()
            reference.zero_grad()
            (reference(whole) * upstream).sum().backward()
            part = rows[own].clone().requires_grad_()
            mine.zero_grad()
            output = mine(part)
            (output * upstream[own]).sum().backward()
        tolerance = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(output, reference(rows)[own], **tolerance)
        torch.testing.assert_close(part.grad, whole.grad[own], **tolerance)
        mine(rows[own])
        for name, buffer in reference.named_buffers():
            torch.testing.assert_close(getattr(mine, name), buffer, **tolerance)
        for name, parameter in reference.named_parameters():
            grad = hvd.allreduce(getattr(mine, name).grad, op=hvd.Sum)
            torch.testing.assert_close(grad, parameter.grad, **tolerance)
        reference.eval()
        mine.eval()
        torch.testing.assert_close(mine(rows[own]), reference(rows)[own], **tolerance)
    with pytest.raises(ValueError, match="at least 2D"):
        mine(torch.ones(3))
