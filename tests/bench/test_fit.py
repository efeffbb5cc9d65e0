"""``sparkdl bench fit``: its table and its checks, and the whole command on a thousandth of the rows."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sparkdl.bench import fit
from sparkdl.bench.contenders.fit import CONTENDERS
from sparkdl.bench.contenders.fit_task import (
    ArithmeticTrial,
    FitSize,
    Fitted,
    loss_of,
    make_model,
    weights_of,
)
from sparkdl.bench.report import format_table
from sparkdl.errors import TrainingError


def fitted(*times: float) -> Fitted:
    started, written, training, trained, ended = times
    return Fitted(
        started=started, written=written, training=training, trained=trained, ended=ended, weights={}
    )


@pytest.mark.slow  # a Spark session of its own, and torch imported by a dozen processes
@pytest.mark.timeout(600)
def test_run_measures_every_contender(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "sparkdl.cli", "bench", "fit", "--scale", "0.01", "--rounds", "1"]
    against = ["--against", "distributor,distributor-local,horovod"]
    # The command would take an existing session of the tests for its own, and stop it.
    subprocess.run([*command, *against, "--json", str(path)], check=True)
    report = json.loads(path.read_text())
    assert set(report["missing"]) <= {"horovod"}
    rows = {row["contender"]: row for row in report["rows"]}
    assert set(rows) | set(report["missing"]) == {"arithmetic", *CONTENDERS}
    for row in rows.values():
        assert 0 < row["median_s"] <= row["p90_s"]
        assert set(row["ratio"]) == set(rows) - {row["contender"]}


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_a_fit_of_sparkdl_is_timed_phase_by_phase_and_has_learned(spark, tmp_path: Path) -> None:
    size = FitSize(num_rows=4096, epochs=1, batch_size=64)
    fits, rows = fit.fit_in_turn(spark, size, ["sparkdl"], 1, tmp_path)
    (found,) = fits["sparkdl"]
    assert sum(found.parts.values()) == pytest.approx(found.phases["training"], rel=0.5)
    assert sum(found.phases.values()) == pytest.approx(found.seconds)
    assert all(seconds > 0 for seconds in found.phases.values())
    assert loss_of(found.weights, rows) < loss_of(weights_of(make_model()), rows) / 2


def test_phases_add_up_to_the_fit_and_have_their_names() -> None:
    found = fitted(10.0, 13.0, 17.5, 27.5, 28.0)
    assert found.phases == {"writing": 3.0, "launching": 4.5, "training": 10.0, "returning": 0.5}
    assert found.seconds == 18.0


def test_rows_contain_medians_phases_and_ratios() -> None:
    fits = {
        "sparkdl": [
            replace(fitted(0.0, 1.0, 2.0, 9.0, 10.0), parts={"computing": 5.0, "reading": 2.0}),
            replace(fitted(0.0, 1.0, 4.0, 9.0, 10.0), parts={"computing": 6.0, "reading": 1.0}),
        ],
        "distributor": [fitted(0.0, 2.0, 8.0, 18.0, 20.0), fitted(0.0, 2.0, 8.0, 18.0, 20.0)],
    }
    size = FitSize(num_rows=1000)
    arithmetic, ours, theirs = fit.make_rows(
        size, [4.0, 5.0, 6.0], fits, {"sparkdl": 0.2, "distributor": 0.3}
    )
    assert (arithmetic["contender"], arithmetic["median_s"], arithmetic["phases_s"]) == (
        "arithmetic",
        5.0,
        {},
    )
    assert ours["phases_s"]["launching"] == 2.0
    assert ours["parts_s"] == {"computing": 5.5, "reading": 1.5}
    assert arithmetic["parts_s"] == theirs["parts_s"] == {}
    assert ours["ratio"] == {"arithmetic": 0.5, "distributor": 2.0}
    assert theirs["ratio"]["sparkdl"] == 0.5
    assert ours["rows_per_s"] == 300.0
    table = format_table([arithmetic, ours, theirs], fit.COLUMNS)
    assert "0.50x" in table
    assert "0.2000" in table


@pytest.mark.parametrize("losses", [{"sparkdl": 0.2, "horovod": 0.5}, {"sparkdl": float("nan")}])
def test_contender_that_has_not_trained_the_same_model_is_an_error(losses: dict[str, float]) -> None:
    with pytest.raises(TrainingError, match=r"has not trained the same model"):
        fit.check_losses(losses)


def test_the_loss_is_the_mean_square_of_the_errors() -> None:
    weights = {name: np.zeros_like(array) for name, array in weights_of(make_model()).items()}
    rows = np.random.default_rng(0).random((100, 29), dtype=np.float32)
    assert loss_of(weights, rows) == pytest.approx(float((rows[:, 28] ** 2).mean()))


def test_a_fit_has_as_many_steps_as_its_rows_need() -> None:
    assert FitSize(num_rows=1_000_000).num_steps == 3 * 1954


def test_arithmetic_trial_updates_every_weight_of_the_model() -> None:
    trial = ArithmeticTrial({"steps": 3, "batch_size": 8}, seed=0)
    before = weights_of(make_model())
    trial.run(2)
    trial.check()
    after = weights_of(trial.model)
    assert all(not np.array_equal(before[name], after[name]) for name in before)
