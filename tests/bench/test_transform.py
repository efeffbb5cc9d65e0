"""``sparkdl bench transform``: refused options, its report, and the whole command on a few rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sparkdl.bench import transform
from sparkdl.bench.contenders.transform import TASKS
from sparkdl.bench.contest import take_turns
from sparkdl.bench.report import format_table
from sparkdl.errors import ParamError


@pytest.mark.slow  # a Spark session of its own, whose workers import torch
@pytest.mark.timeout(600)
def test_run_measures_every_contender_at_every_case(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    options = ["--scale", "0.001", "--seconds", "0.1", "--json", str(path)]
    command = [sys.executable, "-m", "sparkdl.cli", "bench", "transform", *options]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)  # sparkdl's
    report = json.loads(path.read_text())
    assert report["benchmark"] == "transform"
    found = {(row["case"], row["contender"]) for row in report["rows"]}
    assert found == {(case, contender) for case in TASKS for contender in TASKS[case].contenders()}
    for row in report["rows"]:
        assert 0 < row["median_s"] <= row["p90_s"]
        assert row["rows_per_s"] == pytest.approx(row["rows"] / row["median_s"])
    assert "sparkdl is" in shown.stdout


def test_tasks_and_cases_have_the_same_names_in_the_same_order() -> None:
    assert list(TASKS) == list(transform.CASES)


def test_contenders_take_turns_and_the_first_turn_does_not_count() -> None:
    calls: list[str] = []
    actions = {name: (lambda name=name: calls.append(name)) for name in ("a", "b", "c")}
    times, spent = take_turns(actions, 1e-9)
    assert calls == ["a", "b", "c", "b", "c", "a"]
    for seconds in (times, spent):
        assert {name: len(times) for name, times in seconds.items()} == {"a": 1, "b": 1, "c": 1}


def test_rows_hold_rates_and_ratios() -> None:
    ours, other = transform.make_rows(
        "images", 100, {"sparkdl": [1.0, 3.0, 2.0], "spark": [4.0]}, {"sparkdl": [2.0], "spark": [5.0]}
    )
    assert (ours["median_s"], ours["rows_per_s"], ours["ratio"]) == (2.0, 50.0, {"spark": 2.0})
    assert other["ratio"] == {"sparkdl": 0.5}
    assert "0.50x" in format_table([ours, other], transform.COLUMNS)


def test_contenders_with_different_predictions_are_an_error() -> None:
    transform.check_alike("images", {"sparkdl": 1000.0, "spark": 1000.5})
    with pytest.raises(ParamError, match="images: the predictions .* different sums"):
        transform.check_alike("images", {"sparkdl": 1000.0, "spark": 1002.0})
