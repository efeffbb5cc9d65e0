"""``sparkdl bench feed`` end to end, on a hundredth of the rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkdl.bench import feed
from sparkdl.bench.contenders.feed import CONTENDERS, FeedTrial, RandomTable, write_table
from sparkdl.bench.contest import Case, Measurements
from sparkdl.bench.libraries import LIBRARIES
from sparkdl.bench.report import format_table
from tests.bench.parsed import parsed

_OPTIONAL = {"datasets", "streaming"}


@pytest.mark.slow  # two dozen processes that import torch
@pytest.mark.timeout(600)
def test_run_measures_every_contender_at_every_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    assert feed.run(parsed(feed, "--scale", "0.01", "--seconds", "0.01", "--json", str(path))) == 0
    report = json.loads(path.read_text())
    assert report["benchmark"] == "feed"
    assert set(report["missing"]) <= _OPTIONAL
    found = {(row["case"], row["contender"]) for row in report["rows"]}
    assert found == {
        (case, contender)
        for case in feed.DEFAULT_CASES
        for contender in feed.LIBRARIES.keys() - report["missing"]
        if not ("shuffled" in case and contender in ("arrow", "read_table"))
        if not (case == "training" and contender == "read_table")
    }
    for row in report["rows"]:
        assert 0 < row["median_s"] <= row["p90_s"]
        assert 0 <= row["data_wait_share"] <= 1
        assert row["repetitions"] >= 5
    assert "sparkdl is" in capsys.readouterr().out


@pytest.mark.parametrize("contender", list(CONTENDERS))
@pytest.mark.parametrize(
    "table",
    [
        RandomTable(num_rows=100, num_floats=3, rows_per_group=20),
        RandomTable(num_rows=100, list_length=4, rows_per_group=20),
        pytest.param(
            RandomTable(num_rows=100, list_length=4, dtype="uint8", below=256, rows_per_group=20),
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("shuffle_rows", [pytest.param(0, marks=pytest.mark.slow), 30])
def test_every_contender_reads_every_row(
    tmp_path: Path, contender: str, table: RandomTable, shuffle_rows: int
) -> None:
    if reason := LIBRARIES[feed.LIBRARIES[contender]].why_missing():
        pytest.skip(reason)
    settings = write_table(tmp_path / "files", table, 1.0)
    trial = FeedTrial(contender, {**settings, "shuffle_rows": shuffle_rows, "trains": False})
    for _ in range(2):
        trial.run(1)
        trial.check()
    batch = next(iter(CONTENDERS[contender]({**settings, "shuffle_rows": shuffle_rows})()))
    if contender != "read_table":
        assert batch[0].shape[1] == table.width


def test_check_of_a_trial_detects_missing_and_changed_rows(tmp_path: Path) -> None:
    settings = write_table(
        tmp_path / "files", RandomTable(num_rows=100, num_floats=3, rows_per_group=20), 1.0
    )
    case = {**settings, "shuffle_rows": 0, "trains": False}
    trial = FeedTrial("arrow", {**case, "num_rows": 101})
    trial.run(1)
    with pytest.raises(AssertionError, match="100 rows were read of 101"):
        trial.check()
    trial = FeedTrial("torch", {**case, "sum": settings["sum"] * 1.01})
    trial.run(1)
    with pytest.raises(AssertionError, match="adds up to"):
        trial.check()


def test_rows_hold_shares_memory_and_ratios() -> None:
    case = Case(
        name="28 floats",
        settings={
            "num_rows": 100,
            "num_floats": 28,
            "list_length": 0,
            "dtype": "float32",
            "shuffle_rows": 10,
        },
    )
    found = {
        "sparkdl": Measurements(
            times=[1.0, 3.0, 2.0],
            results=[[{"peak_bytes": 7, "waited_s": [0.5, 0.3, 0.2], "cpu_s": [1.0, 2.0, 9.0]}]],
        ),
        "arrow": Measurements(times=[4.0], results=[[{"peak_bytes": 9, "waited_s": [4.0], "cpu_s": [5.0]}]]),
    }
    ours, other = feed.make_rows([case], {"28 floats": found})
    assert (ours["median_s"], ours["rows_per_s"], ours["peak_bytes"]) == (2.0, 50.0, 7)
    assert ours["data_wait_share"] == pytest.approx(0.1)
    assert (ours["cpu_s"], other["cpu_s"]) == (2.0, 5.0)
    assert ours["bound_bytes"] == feed.READ_AHEAD_BYTES + 10 * 28 * 4
    assert ours["ratio"] == {"arrow": 2.0}
    assert other["bound_bytes"] is None
    assert "0.50x" in format_table([ours, other], feed.COLUMNS)
