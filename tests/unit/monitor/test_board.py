"""The figures that the driver computes from the samples of the ranks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from sparkdl.monitor.board import Board, Snapshot, figures_of
from sparkdl.monitor.trace import TraceFile
from tests.unit.monitor.samples import STEP, sample


class Kept:
    """An export that keeps what it is shown."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.is_closed = False

    def show(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def close(self) -> None:
        self.is_closed = True


class Broken(Kept):
    def show(self, snapshot: Snapshot) -> None:
        super().show(snapshot)
        raise OSError("no space left")


def test_figures_are_rates_and_shares_of_the_time_of_the_sample() -> None:
    figures = figures_of({0: sample(0)})[0]
    assert (figures.steps_per_s, figures.rows_per_s, figures.flops_per_s) == (5, 40, 2e9)
    assert (figures.reading, figures.communicating, figures.computing) == (0.25, 0.25, 0.5)
    assert (figures.utilization, figures.bandwidth_share, figures.processor_cores) == (0.2, 0.25, 0.75)
    assert figures.tokens_per_s is None
    assert figures.slowness is None  # there is no other rank


def test_slowness_compares_the_computing_time_of_a_row_with_the_median_of_the_others() -> None:
    samples = {rank: sample(rank, world_size=4) for rank in range(4)}
    samples[2] = sample(2, world_size=4, communicating_s=0.0, reading_s=0.5, rows=40)
    slowness = {rank: figures.slowness for rank, figures in figures_of(samples).items()}
    assert slowness == pytest.approx({0: 1.0, 1: 1.0, 2: 3.0, 3: 1.0})
    samples[2] = sample(2, world_size=4, rows=0)
    assert figures_of(samples)[2].slowness is None


def test_totals_are_of_all_ranks() -> None:
    ranks = figures_of({0: sample(0), 1: sample(1, communicating_s=1.0, tokens=100)})
    totals = Snapshot(name="fit", number=1, at=0.0, began_at=0.0, ranks=ranks).totals()
    assert totals["rows_per_s"] == 80
    assert totals["tokens_per_s"] == 50
    assert totals["utilization"] == pytest.approx(0.2)
    assert totals["communicating"] == 0.375
    assert totals["efficiency"] == 0.625
    assert totals["slowness"] == pytest.approx(2.0)


def test_a_snapshot_is_shown_once_every_rank_has_sent_a_sample() -> None:
    kept = Kept()
    with Board("fit", [kept]) as board:
        assert [list(snapshot.ranks) for snapshot in kept.snapshots] == [[]]
        board.handle(STEP)
        board.handle(sample(0))
        assert len(kept.snapshots) == 1
        board.handle(sample(1))
        assert (kept.snapshots[-1].number, list(kept.snapshots[-1].ranks)) == (1, [0, 1])
        assert kept.snapshots[-1].position == {
            name: STEP[name] for name in ("epoch", "epochs", "step", "steps", "loss", "eta_s")
        }
    assert kept.is_closed
    assert len(kept.snapshots) == 2


def test_a_late_rank_does_not_keep_the_samples_of_others_back() -> None:
    kept = Kept()
    with Board("fit", [kept]) as board:
        board.handle(sample(0, rows=80))
        board.handle(sample(0, rows=160))
        assert kept.snapshots[-1].ranks[0].rows_per_s == 40
    assert kept.snapshots[-1].ranks[0].rows_per_s == 80


def test_ranks_that_an_elastic_fit_has_lost_are_no_longer_shown() -> None:
    kept = Kept()
    with Board("fit", [kept]) as board:
        for rank in range(3):
            board.handle(sample(rank, world_size=3))
        assert list(kept.snapshots[-1].ranks) == [0, 1, 2]
        for rank in range(2):
            board.handle(sample(rank, world_size=2))
        assert list(kept.snapshots[-1].ranks) == [0, 1]


def test_an_export_that_fails_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    broken, kept = Broken(), Kept()
    with Board("fit", [broken, kept]) as board:
        board.handle(sample(0, world_size=1))
    assert (len(broken.snapshots), len(kept.snapshots)) == (1, 2)
    assert broken.is_closed
    assert "The figures of fit are no longer written by Broken: OSError: no space left" in caplog.text


class BrokenAtEnd(Kept):
    def close(self) -> None:
        raise OSError("no space left")


def test_errors_of_the_trace_and_at_the_end_are_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, trace = Kept(), TraceFile(str(tmp_path / "trace.json"))
    with Board("fit", [kept, BrokenAtEnd()], trace) as board:
        board.handle({"kind": "trace", "number": 0, "part": "bm8gZ3ppcA==", "is_last": True})
        board.handle({"kind": "trace", "number": 0, "part": "bm8gZ3ppcA==", "is_last": True})
    assert kept.is_closed
    assert not (tmp_path / "trace.json").exists()
    assert caplog.text.count("no longer written by TraceFile: BadGzipFile") == 1
    assert caplog.text.count("no longer written by BrokenAtEnd: OSError: no space left") == 1


def test_a_sample_without_a_step_has_known_figures_of_zero() -> None:
    figures = figures_of({0: sample(0, steps=0, rows=0, tokens=0, flops=0.0)})[0]
    assert (figures.tokens_per_s, figures.flops_per_s, figures.utilization) == (0, 0, 0)
    assert figures_of({0: sample(0, flops=None)})[0].utilization is None


def test_a_snapshot_survives_a_round_trip_through_json() -> None:
    ranks = figures_of({0: sample(0), 1: sample(1)})
    snapshot = Snapshot(name="fit", number=3, at=2.0, began_at=1.0, position={"epoch": 1}, ranks=ranks)
    assert Snapshot.from_fields(json.loads(json.dumps(asdict(snapshot)))) == snapshot
