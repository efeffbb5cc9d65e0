"""A fit whose ranks are lost, frozen and joined by others makes the updates of an undisturbed one."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl.errors import ParamError, RankDiedError, RankError
from sparkdl.launch import run_on_local_ranks
from sparkdl.launch.elastic.roster import ElasticLimits
from sparkdl.parallel import Parallelism
from sparkdl.training.callbacks import Callback, FitContext
from sparkdl.training.remote.fit_on_rank import IMPORTED_FIRST, fit_on_rank
from sparkdl.training.remote.transfer import fetch_module, store_spec
from sparkdl.training.spec import CheckpointPlan
from tests.processes import wait_until_gone
from tests.training.scenes.training_scenes import (
    assert_same_weights,
    make_model,
    make_spec,
    train_in_one_process,
    write_dataset,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkdl.launch import RankContext
    from sparkdl.training.history import FitOutcome
    from sparkdl.training.spec import TrainingSpec

PLANNED = 3
TOLERANCE = 2e-6  # float32, other order of sums
NUM_ROWS = 403  # 17 steps of 24 rows, the last of 19


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), NUM_ROWS)


def slowly(until: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Take long for a step until the file exists, so that what is to happen happens during the fit."""
    time.sleep(0.01 if Path(until).exists() else 0.3)
    return arrays


def slow_spec(folder: Path, **changes: Any) -> TrainingSpec:
    return make_spec(
        **{
            "augment": partial(slowly, str(folder / "all came")),
            "optimizer": partial(torch.optim.AdamW, lr=0.02),
            "epochs": 3,
            **changes,
        }
    )


def fit_and_report(context: RankContext, *args: Any, **kwargs: Any) -> FitOutcome | None:
    context.report({"kind": "pid", "pid": os.getpid()})
    return fit_on_rank(context, *args, **kwargs)


class Fit:
    """An elastic fit on this machine, and what happens to its ranks meanwhile.

    Args:
        act: called with this object, the number of a member and each event that it reports.
        folder: folder in which a file says that as many members as are expected have come.
        expected: number of members that are expected, with those that are lost.
    """

    def __init__(self, act: Callable[[Fit, int, dict[str, Any]], None], folder: Path, expected: int) -> None:
        self.act, self.folder, self.expected = act, folder, expected
        self.pids: dict[int, int] = {}
        self.steps: list[tuple[int, int]] = []
        self.worlds: list[tuple[int, int, int]] = []

    def run(
        self,
        folder: Path,
        spec: TrainingSpec,
        dataset: Any,
        *,
        planned_ranks: int | None = PLANNED,
        num_ranks: int = PLANNED,
        hang_timeout_s: float = 30.0,
        **limits: Any,
    ) -> tuple[nn.Module, FitOutcome]:
        folder.mkdir()
        limits = {"least": 1, "most": PLANNED, "max_restarts": 10, **limits}
        values = run_on_local_ranks(
            partial(fit_and_report, planned_ranks=planned_ranks),
            store_spec(spec, str(folder)),
            dataset,
            num_ranks=num_ranks,
            elastic=ElasticLimits(**limits),
            on_event=self._on_event,
            hang_timeout_s=hang_timeout_s,
            modules=IMPORTED_FIRST,
        )
        assert wait_until_gone(list(self.pids.values())) == []
        return fetch_module(values[0].module, str(folder)), values[0]

    def kill(self, member: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[member], number)

    def _on_event(self, member: int, event: dict[str, Any]) -> None:
        if event["kind"] == "pid":
            self.pids[member] = event["pid"]
            if len(self.pids) == self.expected:
                (self.folder / "all came").touch()
        elif event["kind"] == "step":
            self.steps.append((event["epoch"], event["step"]))
        elif event["kind"] == "world":
            self.worlds.append((event["ranks"], event["losses"], event["retries"]))
        self.act(self, member, event)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(20))
def test_kills_and_a_freeze_at_random_moments_change_nothing(dataset, tmp_path, seed):
    """Of three ranks two are killed and one is frozen at random times from the launch to the end."""
    draw = random.Random(seed)
    expected = train_in_one_process(slow_spec(tmp_path), dataset, PLANNED)
    fit = Fit(lambda fit, member, event: None, tmp_path, PLANNED + 9)  # slow to the end

    def disturb() -> None:
        for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP):
            time.sleep(draw.uniform(0.0, 4.0))
            if fit.pids:
                with suppress(ProcessLookupError):
                    os.kill(draw.choice(list(fit.pids.values())[-PLANNED:]), number)

    disturber = threading.Thread(target=disturb, daemon=True)
    disturber.start()
    module, outcome = fit.run(tmp_path / "fit", slow_spec(tmp_path), dataset, hang_timeout_s=4.0)
    disturber.join()
    assert [record.epoch for record in outcome.history] == [1, 2, 3]
    assert [record.rows for record in outcome.history] == [NUM_ROWS] * 3
    assert_same_weights(state_of(module), expected, atol=TOLERANCE)


def state_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in module.state_dict().items()}


def kill_in_turn(*members: int) -> Callable[[Fit, int, dict[str, Any]], None]:
    """Kill members, each when a step is reported after the one before."""
    left = list(members)

    def act(fit: Fit, member: int, event: dict[str, Any]) -> None:
        if event["kind"] == "step" and left and left[0] in fit.pids:
            fit.kill(left.pop(0))

    return act


@pytest.mark.parametrize(
    "members",
    [
        pytest.param((1,), id="one rank", marks=pytest.mark.slow),
        pytest.param((0, 3, 2), id="rank 0, its successor, another"),
    ],
)
def test_a_fit_that_loses_ranks_makes_the_updates_of_one_that_does_not(dataset, tmp_path, members):
    expected = train_in_one_process(slow_spec(tmp_path), dataset, PLANNED)
    fit = Fit(kill_in_turn(*members), tmp_path, PLANNED + len(members))
    module, outcome = fit.run(tmp_path / "fit", slow_spec(tmp_path), dataset)
    assert len(fit.pids) == PLANNED + len(members)
    assert [record.rows for record in outcome.history] == [NUM_ROWS] * 3
    assert_same_weights(state_of(module), expected, atol=TOLERANCE)


def test_a_rank_that_gets_sigterm_leaves_after_a_step_and_is_replaced(dataset, tmp_path, caplog):
    expected = train_in_one_process(slow_spec(tmp_path), dataset, PLANNED)
    asked: list[int] = []

    def act(fit: Fit, member: int, event: dict[str, Any]) -> None:
        if event["kind"] == "step" and not asked:
            asked.append(1)
            fit.kill(1, signal.SIGTERM)
        elif event["kind"] == "world" and asked and event["ranks"] == PLANNED:
            (tmp_path / "all came").touch()

    fit = Fit(act, tmp_path, PLANNED + 2)  # slow until the replacement is in a world
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        module, outcome = fit.run(tmp_path / "fit", slow_spec(tmp_path), dataset)
    assert "without member 1, as asked" in caplog.text
    assert "was lost" not in caplog.text
    assert fit.worlds[-1] == (PLANNED, 0, 0)
    assert [record.rows for record in outcome.history] == [NUM_ROWS] * 3
    assert_same_weights(state_of(module), expected, atol=TOLERANCE)


def test_a_connection_that_is_cut_makes_the_same_ranks_meet_again(dataset, tmp_path):
    expected = train_in_one_process(slow_spec(tmp_path), dataset, PLANNED)
    plan = partial(abort_once, str(tmp_path / "cut"))
    fit = Fit(lambda fit, member, event: None, tmp_path, PLANNED)
    module, outcome = fit.run(tmp_path / "fit", slow_spec(tmp_path, augment=plan), dataset)
    assert (tmp_path / "cut").exists()
    assert fit.worlds == [(PLANNED, 0, 0), (PLANNED, 0, 1)]
    assert [record.rows for record in outcome.history] == [NUM_ROWS] * 3
    assert_same_weights(state_of(module), expected, atol=TOLERANCE)


def abort_once(marker: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Break this rank's connections in its fourth step, as a link that is cut does."""
    from sparkdl.collective.current import provided_communicator

    communicator = provided_communicator()
    path = Path(marker)
    calls.append(1)
    if communicator is not None and communicator.rank == 1 and len(calls) == 4 and not path.exists():
        path.touch()
        communicator.abort("a link was cut")
    return arrays


calls: list[int] = []


@pytest.mark.slow  # SIGTERM replaces a rank daily
def test_a_frozen_rank_is_replaced_and_leaves_without_a_trace_when_it_runs_on(dataset, tmp_path):
    expected = train_in_one_process(slow_spec(tmp_path), dataset, PLANNED)
    was_frozen: list[int] = []

    def act(fit: Fit, member: int, event: dict[str, Any]) -> None:
        if event["kind"] == "step" and not was_frozen:
            fit.kill(1, signal.SIGSTOP)
            was_frozen.append(fit.pids[1])
        elif event["kind"] == "pid" and member >= PLANNED:
            with suppress(ProcessLookupError):  # it may have been ended already
                os.kill(was_frozen[0], signal.SIGCONT)

    fit = Fit(act, tmp_path, PLANNED + 1)
    module, outcome = fit.run(tmp_path / "fit", slow_spec(tmp_path), dataset, hang_timeout_s=4.0)
    assert was_frozen
    assert [record.rows for record in outcome.history] == [NUM_ROWS] * 3
    assert_same_weights(state_of(module), expected, atol=TOLERANCE)


def test_ranks_join_while_a_fit_runs_and_every_row_still_counts_once(dataset, tmp_path):
    fit = Fit(lambda fit, member, event: None, tmp_path, PLANNED)
    module, outcome = fit.run(
        tmp_path / "fit", slow_spec(tmp_path, epochs=4), dataset, planned_ranks=PLANNED, num_ranks=1
    )
    assert len(fit.pids) == PLANNED
    assert [record.rows for record in outcome.history] == [NUM_ROWS] * 4
    assert [len(record.rank_seconds) for record in outcome.history][-1] == PLANNED
    expected = train_in_one_process(slow_spec(tmp_path, epochs=4), dataset, PLANNED)
    assert_same_weights(state_of(module), expected, atol=TOLERANCE)


@pytest.mark.slow  # tests/unit/data/feed/test_planned_feed.py has changing shares daily
def test_a_rank_that_is_lost_or_joins_leaves_rows_divided_by_speed_exact(dataset, tmp_path):
    """Each world begins with equal rows; steps are long enough for changes within worlds."""
    spec = slow_spec(tmp_path, epochs=4, balance="speed")
    expected = train_in_one_process(slow_spec(tmp_path, epochs=4), dataset, PLANNED)
    fit = Fit(kill_in_turn(1), tmp_path, PLANNED + 1)
    module, outcome = fit.run(tmp_path / "fit", spec, dataset)
    assert len(fit.pids) == PLANNED + 1
    assert [record.rows for record in outcome.history] == [NUM_ROWS] * 4
    assert sum(outcome.history[-1].rank_rows) == PLANNED * 8
    assert_same_weights(state_of(module), expected, atol=TOLERANCE)


class SlowOnOneRank(nn.Sequential):
    """Takes ten times as long on the process that was the first one to be rank 1."""

    def __init__(self, folder: Path) -> None:
        super().__init__(*make_model())
        self.marker = str(folder / "slow")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        marker = Path(self.marker)
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1 and not marker.exists():
            marker.write_text(str(os.getpid()))
        is_slow = marker.exists() and marker.read_text() == str(os.getpid())
        time.sleep(0.2 if is_slow else 0.02)
        return super().forward(rows)


@pytest.mark.slow  # tests/unit/training/test_balance.py finds such ranks daily; SIGTERM replaces one
def test_a_rank_that_is_slow_for_long_is_named_and_replaced(dataset, tmp_path, caplog, capfd):
    named: list[tuple[int, float]] = []

    def act(fit: Fit, member: int, event: dict[str, Any]) -> None:
        if event["kind"] == "straggler":
            named.append((event["slow_rank"], event["ratio"]))

    (tmp_path / "all came").touch()
    spec = make_spec(
        model=SlowOnOneRank(tmp_path),
        optimizer=partial(torch.optim.AdamW, lr=0.02),
        epochs=6,
        straggler_factor=3.0,
        straggler_seconds=1.0,
        replaces_stragglers=True,
    )
    expected = train_in_one_process(make_spec(optimizer=spec.optimizer, epochs=6), dataset, PLANNED)
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        module, outcome = Fit(act, tmp_path, PLANNED + 1).run(tmp_path / "fit", spec, dataset)
    assert [rank for rank, _ in named] == [1]
    assert named[0][1] > 3
    assert "times the median time of the other ranks for a row" in capfd.readouterr().err
    assert "without member 1, as asked" in caplog.text
    assert [record.rows for record in outcome.history] == [NUM_ROWS] * 6
    assert_same_weights(state_of(module), expected, atol=TOLERANCE)


class SumsAtTheEnd(Callback):
    """Communicates at the end of each epoch; a rank dies there once."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def on_epoch_end(self, context: FitContext) -> None:
        if context.epoch == 2 and context.rank == 1 and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.all_reduce(torch.ones(1))


@pytest.mark.slow
def test_an_epoch_whose_callbacks_lose_a_rank_counts_once(dataset, tmp_path):
    expected = train_in_one_process(slow_spec(tmp_path), dataset, PLANNED)
    spec = slow_spec(tmp_path, callbacks=(SumsAtTheEnd(str(tmp_path / "killed")),))
    fit = Fit(lambda fit, member, event: None, tmp_path, PLANNED)
    module, outcome = fit.run(tmp_path / "fit", spec, dataset)
    assert (tmp_path / "killed").exists()
    assert [(record.epoch, record.rows) for record in outcome.history] == [(n, NUM_ROWS) for n in (1, 2, 3)]
    assert_same_weights(state_of(module), expected, atol=TOLERANCE)


@pytest.mark.slow
def test_batches_of_ranks_keep_their_size_whoever_is_there(dataset, tmp_path):
    num_steps = set()

    def act(fit: Fit, member: int, event: dict[str, Any]) -> None:
        kill(fit, member, event)
        if event["kind"] == "step":
            num_steps.add(event["steps"])

    kill = kill_in_turn(1)
    fit = Fit(act, tmp_path, PLANNED)
    _, outcome = fit.run(tmp_path / "fit", slow_spec(tmp_path), dataset, planned_ranks=None, max_restarts=0)
    assert num_steps == {17, 26}  # of 3 and of 2 ranks with 8 rows each
    assert [record.rows for record in outcome.history[1:]] == [NUM_ROWS] * 2
    assert outcome.history[-1].loss < outcome.history[0].loss


def test_a_fit_that_loses_all_ranks_continues_from_its_last_checkpoint(dataset, tmp_path):
    expected = train_in_one_process(slow_spec(tmp_path), dataset, PLANNED)
    plan = CheckpointPlan(url=str(tmp_path / "checkpoints"), every_updates=4, num_kept=2)
    epochs: list[int] = []

    def act(fit: Fit, member: int, event: dict[str, Any]) -> None:
        if event["kind"] == "resumed":
            epochs.append(event["epoch"])
        elif event["kind"] == "step" and event["epoch"] == 2 and len(fit.pids) == PLANNED:
            for pid in fit.pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    fit = Fit(act, tmp_path, PLANNED)
    module, outcome = fit.run(tmp_path / "fit", slow_spec(tmp_path, checkpoints=plan), dataset)
    assert epochs
    assert set(epochs) == {2}
    assert [record.rows for record in outcome.history] == [NUM_ROWS] * 3
    assert_same_weights(state_of(module), expected, atol=TOLERANCE)


@pytest.mark.slow  # tests/runner/test_elastic_worlds.py replaces groups of ranks daily
@pytest.mark.parametrize(
    ("parallelism", "num_readers"),
    [(Parallelism(tensor=2), 2), (Parallelism(shard=2), 4), (Parallelism(pipeline=2), 2)],
    ids=["tensor", "shard", "pipeline"],
)
def test_replicas_of_a_divided_model_are_lost_and_replaced_as_a_whole(
    dataset, tmp_path, parallelism, num_readers
):
    """Of two replicas on two ranks each, first the second loses a rank, and then the first."""

    def spec() -> TrainingSpec:
        model = make_model()
        model.tensor_plan = {"0": "colwise", "2": "rowwise"}
        return slow_spec(tmp_path, model=model)

    expected = train_in_one_process(spec(), dataset, num_readers)
    fit = Fit(kill_in_turn(3, 0), tmp_path, 8)
    module, outcome = fit.run(
        tmp_path / "fit",
        dataclasses.replace(spec(), parallelism=parallelism),
        dataset,
        planned_ranks=4,
        num_ranks=4,
        least=2,
        most=4,
        group_size=2,
    )
    assert len(fit.pids) == 8
    assert [record.rows for record in outcome.history] == [NUM_ROWS] * 3
    assert_same_weights(state_of(module), expected, atol=TOLERANCE)


def test_code_that_raises_ends_all_ranks_and_losses_have_a_limit(dataset, tmp_path):
    with pytest.raises(RankError, match="no such image"):
        Fit(lambda fit, member, event: None, tmp_path, PLANNED).run(
            tmp_path / "raises", slow_spec(tmp_path, augment=fails), dataset
        )
    with pytest.raises(RankDiedError, match="SIGKILL"):
        Fit(kill_in_turn(2), tmp_path, PLANNED).run(
            tmp_path / "lost", slow_spec(tmp_path), dataset, least=3, max_restarts=0
        )


def fails(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    raise ValueError("no such image")


@pytest.mark.parametrize("limits", [{"least": 0}, {"least": 4}, {"most": 2}])
def test_bounds_that_contradict_each_other_are_refused(limits):
    limits = {"least": 1, "most": 3, "max_restarts": 0, **limits}
    with pytest.raises(ParamError, match="begins with 3 ranks"):
        run_on_local_ranks(print, num_ranks=3, elastic=ElasticLimits(**limits))


def test_mpi_cannot_be_elastic():
    with pytest.raises(ParamError, match="no rank can leave or join an MPI world"):
        run_on_local_ranks(
            print, num_ranks=1, transport="mpi", elastic=ElasticLimits(least=1, most=1, max_restarts=0)
        )
