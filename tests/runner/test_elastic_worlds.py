"""Runs that continue when ranks are lost and when others join, in the processes of those that are left."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sparkdl.horovod.torch as hvd
from sparkdl.errors import ParamError
from sparkdl.parallel import Parallelism
from sparkdl.runner import TrainingState
from tests.runner.local_runner import make_runner

NUM_EPOCHS = 40


def make_parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def make_gradients(model: torch.nn.Module, epoch: int) -> None:
    """Compute the gradients of all ranks together; every rank has the same rows."""
    time.sleep(0.05)  # so that a rank can come while others train
    rows = torch.arange(12.0).reshape(3, 4) / (epoch + 1)
    model.zero_grad()
    model(rows).square().mean().backward()


def die_once(marker: str | None, epoch: int, rank: int) -> None:
    if marker is not None and epoch == 3 and rank == 1 and not Path(marker).exists():
        Path(marker).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)


def train(marker: str | None) -> dict[str, Any]:
    model, optimizer = make_parts()
    state = TrainingState(model=model, optimizer=optimizer, epoch=0, sizes=[])
    while state.epoch < NUM_EPOCHS:
        if marker is not None and state.epoch == NUM_EPOCHS - 1 and dist.get_world_size() == 1:
            time.sleep(0.05)  # a step; ranks join at commits
            state.commit()
            continue
        make_gradients(model, state.epoch)
        die_once(marker, state.epoch, dist.get_rank())
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        state.sizes = [*state.sizes, dist.get_world_size()]
        state.epoch += 1
        state.commit()
    return {"pid": os.getpid(), "sizes": state.sizes, "weight": model.weight.detach()}


def train_for_horovod(marker: str | None) -> dict[str, Any]:
    """Train as :func:`train` does, written as in Horovod's documentation."""
    hvd.init()
    model, optimizer = make_parts()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    resets: list[int] = []

    @hvd.elastic.run
    def run(state: Any) -> None:
        while state.epoch < NUM_EPOCHS:
            die_once(marker, state.epoch, hvd.rank())
            make_gradients(state.model, state.epoch)
            state.optimizer.step()
            state.sizes = [*state.sizes, hvd.size()]
            state.epoch += 1
            state.commit()

    state = hvd.elastic.TorchState(model, optimizer, epoch=0, sizes=[])
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    run(state)
    return {"pid": os.getpid(), "sizes": state.sizes, "weight": model.weight.detach(), "resets": resets}


def train_with_sets(marker: str | None) -> dict[str, Any]:
    """Sum over process sets: by a rule given to init, by a rule that is added later, by numbers."""
    last = hvd.ProcessSet(lambda size: [size - 1])
    numbers = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[last, numbers])
    ends = hvd.add_process_set(hvd.ProcessSet(lambda size: {0, size - 1}))
    seen: list[tuple[int, int, bool]] = []

    @hvd.elastic.run
    def run(state: Any) -> None:
        while state.epoch < NUM_EPOCHS:
            time.sleep(0.05)
            die_once(marker, state.epoch, hvd.rank())
            size = hvd.size()
            if hvd.rank() == size - 1:
                hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=last, name="last")
            if ends.included():
                total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=ends, name="ends")
                seen.append((size, int(total), last.included()))
            if hvd.rank() < 2:
                hvd.allreduce(torch.ones(1), process_set=numbers, name="numbers")
            hvd.allreduce(torch.ones(1), name="all")
            state.epoch += 1
            state.commit()

    run(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=0))
    return {"seen": seen}


def test_process_sets_are_opened_by_their_rules_in_each_world(tmp_path):
    values = make_runner(num_workers=3, elastic=True).run_all(train_with_sets, str(tmp_path / "killed"))
    assert (tmp_path / "killed").exists()
    assert {(size, total) for size, total, _ in values[0]["seen"]} == {(2, 2), (3, 2)}
    assert {is_last for _, _, is_last in values[2]["seen"]} == {True}


def train_with_numbers_that_go(marker: str) -> str:
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair] if hvd_size() == 3 else [])
    message = ""

    @hvd.elastic.run
    def run(state: Any) -> None:
        nonlocal message
        while state.epoch < 5:
            die_once(marker, state.epoch, hvd.rank())
            if hvd.size() == 2:
                with pytest.raises(ValueError, match="in a world that") as caught:
                    hvd.allreduce(torch.ones(1), process_set=pair)
                message = str(caught.value)
            hvd.allreduce(torch.ones(1), name="all")
            state.epoch += 1
            state.commit()

    run(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=0))
    return message


def hvd_size() -> int:
    return dist.get_world_size()


def test_a_process_set_with_a_number_that_does_not_exist_is_an_error_and_no_sum(tmp_path):
    runner = make_runner(num_workers=3, elastic=True)
    runner.max_restarts = 0
    values = runner.run_all(train_with_numbers_that_go, str(tmp_path / "killed"))
    assert all("hvd.add_process_set()" in message for message in values)


@pytest.mark.parametrize("function", [train, pytest.param(train_for_horovod, marks=pytest.mark.slow)])
def test_a_run_that_loses_a_rank_continues_and_takes_in_another(function, tmp_path, caplog):
    undisturbed = make_runner().run(function, None)
    assert undisturbed["sizes"] == [2] * NUM_EPOCHS
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        values = make_runner(elastic=True).run_all(function, str(tmp_path / "killed"))
    assert (tmp_path / "killed").exists()
    for value in values:
        sizes = value["sizes"]
        assert len(sizes) == NUM_EPOCHS  # each epoch counts once
        assert sizes[:3] == [2, 2, 2]
        assert sizes[3] == 1
        assert sizes[-1] == 2
        torch.testing.assert_close(value["weight"], undisturbed["weight"])
    assert "The run continues with 1 rank, without member 1." in caplog.text
    assert "The run continues with 2 ranks, with member 2 in addition." in caplog.text
    if "resets" in values[0]:
        assert values[0]["resets"] == [1, 2]
        assert values[1]["resets"] == []


def test_ranks_join_up_to_the_maximum(tmp_path):
    values = make_runner(num_workers=1, elastic=True, max_workers=2).run_all(train, None)
    assert len({value["pid"] for value in values}) == 2
    sizes = values[0]["sizes"]
    assert (sizes[0], sizes[-1], len(sizes)) == (1, 2, NUM_EPOCHS)


def plain(marker: str) -> int:
    """Without a state: the function begins again in the next world."""
    die_once(marker, 3, dist.get_rank())
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


def test_a_function_without_a_state_is_called_again(tmp_path):
    values = make_runner(num_workers=3, elastic=True).run_all(plain, str(tmp_path / "killed"))
    assert (tmp_path / "killed").exists()
    assert set(values) <= {2, 3}
    assert len(set(values)) == 1


def in_pairs(marker: str) -> dict[str, list[int]]:
    """Lay out a mesh in which pairs of ranks have a copy of a model."""
    layout = Parallelism(tensor=2).lay_out(by_replica=True)
    die_once(marker, 3, dist.get_rank())
    total = torch.ones(1)
    dist.all_reduce(total, group=layout.group("data"))
    return {"pair": layout.ranks("tensor"), "copies": [int(total)]}


def test_ranks_of_a_group_are_lost_and_replaced_together_and_meshes_are_made_anew(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        values = make_runner(num_workers=4, elastic=True, group_size=2).run_all(
            in_pairs, str(tmp_path / "killed")
        )
    assert (tmp_path / "killed").exists()
    assert "The run continues with 2 ranks, without member 0." in caplog.text
    pairs = [value["pair"] for value in values if value is not None]
    assert pairs in ([[0, 1]] * 2, [[0, 1], [0, 1], [2, 3], [2, 3]])
    assert {tuple(value["copies"]) for value in values if value is not None} == {(len(pairs) // 2,)}


def test_bounds_of_a_run_are_checked():
    with pytest.raises(ParamError, match="group_size=2 must be at least 1, and needs elastic=True"):
        make_runner(group_size=2).run(plain, "")
    with pytest.raises(ParamError, match="have to be multiples of 2, the ranks that share a model"):
        make_runner(num_workers=3, elastic=True, group_size=2).run(plain, "")
    with pytest.raises(ParamError, match="max_workers=3 .* needs elastic=True"):
        make_runner(max_workers=3).run(plain, "")
    with pytest.raises(ParamError, match="max_workers=1 must be at least num_workers=2"):
        make_runner(max_workers=1, elastic=True).run(plain, "")
