"""Monitored trainings on real ranks: their samples are true, and their weights are those without a monitor."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow
import pytest
from torch import nn

from sparkdl.errors import ParamError, RankError
from sparkdl.monitor import Monitor
from sparkdl.monitor.board import Snapshot
from sparkdl.monitor.exports import status_folder
from sparkdl.parallel import Parallelism
from tests.monitor.monitored_trainings import (
    PATIENCE_S,
    WIDTH,
    fail_after_a_step,
    train_until,
    train_with_samples,
    wait_for_each_other,
)
from tests.run_ranks import run_ranks
from tests.runner.local_runner import make_runner
from tests.servers.fresh_mlflow import tracked
from tests.training.scenes.training_scenes import assert_same_weights, make_spec, write_dataset

__all__ = ["tracked"]

NUM_ROWS = 45
ONCE = Monitor(seconds=600, peak_tflops=1.0)
"""Takes one sample, at the end."""


def total(samples: list[list[dict[str, Any]]], name: str) -> float:
    return sum(sample[name] or 0 for of_rank in samples for sample in of_rank)


def flops_of(num_rows: int) -> int:
    """Operations of training the network of ``make_model`` on rows; the first layer has no gradient of its input."""
    return num_rows * (2 * 2 * 4 * 8 + 3 * 2 * 8 * 3)


def test_samples_of_a_training_are_true_and_its_weights_are_those_without_a_monitor(tmp_path: Path) -> None:
    spec, dataset = make_spec(epochs=3), write_dataset(tmp_path / "rows", NUM_ROWS)
    plain = run_ranks(2, train_with_samples, spec, dataset, None)
    watched = run_ranks(2, train_with_samples, spec, dataset, ONCE)
    for (expected, _), (weights, _) in zip(plain, watched, strict=True):
        assert_same_weights(weights, expected)
    samples = [events for _, events in watched]
    assert total(samples, "rows") == 3 * NUM_ROWS
    assert total(samples, "flops") == flops_of(3 * NUM_ROWS)
    for rank, events in enumerate(samples):
        assert {(event["rank"], event["world_size"]) for event in events} == {(rank, 2)}
        assert sum(event["steps"] for event in events) == 3 * 3
        assert sum(event["communicating_s"] for event in events) > 0
        assert all(event["reading_s"] + event["communicating_s"] <= event["seconds"] for event in events)


class Widths(nn.Module):
    """Two linear layers, which a plan of tensor parallelism may divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, rows: Any) -> Any:
        return self.second(self.first(rows).tanh())


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(Parallelism(shard=2), id="shard", marks=pytest.mark.slow),
        pytest.param(Parallelism(tensor=2), id="tensor"),
    ],
)
def test_ranks_that_divide_a_model_count_the_operations_of_their_parts(
    tmp_path: Path, sizes: Parallelism
) -> None:
    dataset = write_dataset(tmp_path / "rows", NUM_ROWS)
    model = Widths()
    if sizes.tensor > 1:
        model.tensor_plan = {"first": "colwise", "second": "rowwise"}
    spec = make_spec(model=model, parallelism=sizes)
    samples = [events for _, events in run_ranks(2, train_with_samples, spec, dataset, ONCE)]
    rows = 2 * NUM_ROWS  # both epochs
    # A rank that reads no rows of its own counts whole steps, and the last one of an epoch has fewer rows.
    assert total(samples, "flops") == pytest.approx(flops_of(rows), rel=0.05)


@contextmanager
def until_seen(folder: Path, seen: list[Any], look: Any) -> Iterator[None]:
    """Call a function on a thread until it returns something, which ends the training of :func:`train_until`."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.05):
            found = look()
            if found is not None:
                seen.append(found)
                (folder / "seen").touch()
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(PATIENCE_S)


def running(name: str) -> Snapshot | None:
    """The latest snapshot of a running monitor with samples of two ranks."""
    for path in status_folder().glob("*.json"):
        try:
            snapshot = Snapshot.from_fields(json.loads(path.read_text()))
        except (FileNotFoundError, json.JSONDecodeError):
            continue
        if snapshot.name == name and len(snapshot.ranks) == 2 and snapshot.totals().get("flops_per_s"):
            return snapshot
    return None


def test_a_run_is_seen_at_its_endpoint_and_in_mlflow_while_it_runs(
    tmp_path: Path, tracked: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("prometheus_client")
    seen: list[Any] = []

    def look() -> str | None:
        urls = [
            record.getMessage().split()[-1] for record in caplog.records if "/metrics" in record.getMessage()
        ]
        if not urls or running("train_until") is None:
            return None
        with urllib.request.urlopen(urls[0], timeout=60) as response:
            return str(response.read().decode())

    with mlflow.start_run() as active, until_seen(tmp_path, seen, look):
        steps = make_runner(monitor=Monitor(seconds=0.2, port=0)).run(train_until, str(tmp_path), 20)
    assert steps >= 20
    (text,) = seen
    assert 'sparkdl_ranks{fit="train_until"} 2.0' in text
    assert 'sparkdl_rank_rows_per_second{fit="train_until",host=' in text
    client = mlflow.MlflowClient()
    history = client.get_metric_history(active.info.run_id, "system/rank_1/rows_per_s")
    assert [point.step for point in history] == list(range(1, len(history) + 1))
    assert history
    metrics = client.get_run(active.info.run_id).data.metrics
    assert metrics["system/fit/tokens_per_s"] == pytest.approx(3 * metrics["system/fit/rows_per_s"])
    assert metrics["system/fit/flops_per_s"] == pytest.approx(
        2 * 2 * WIDTH * WIDTH * metrics["system/fit/rows_per_s"], rel=0.01
    )
    assert running("train_until") is None  # the file is removed at the end


def test_a_function_that_fails_in_a_counted_step_fails_with_its_own_error() -> None:
    with pytest.raises(RankError, match="no more"):
        make_runner(monitor=Monitor(seconds=0.2)).run(fail_after_a_step)


def test_a_monitor_that_cannot_be_opened_starts_no_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    pytest.importorskip("tensorboard")
    with pytest.raises(ParamError, match="tensorboard of the Monitor"):
        make_runner(monitor=Monitor(tensorboard=str(tmp_path / "file" / "board"))).run(
            train_until, str(tmp_path), 1
        )


def test_a_rank_that_waits_for_another_one_is_seen_waiting_before_the_wait_has_ended() -> None:
    events, _ = run_ranks(2, wait_for_each_other, Monitor(seconds=0.5))
    # Rank 1 ends the wait once rank 0 has sent such a sample.
    assert any(event["communicating_s"] > 0.9 * event["seconds"] for event in events)
    assert all(event["communicating_s"] <= event["seconds"] for event in events)
