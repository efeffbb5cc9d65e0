"""A fit that is monitored: its figures are read from MLflow, TensorBoard, the endpoint and the trace."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from pathlib import Path
from typing import Any

import mlflow
import pytest

from sparkdl.errors import ParamError
from sparkdl.monitor import Monitor
from sparkdl.monitor.top import running_snapshots
from tests.spark.estimators.estimator_examples import NUM_ROWS, make_estimator

pytest.importorskip("prometheus_client")
pytest.importorskip("tensorboard")

FIRST_LAYERS = 2 * (2 * 4 * 16) + 3 * (2 * 16 * 3)
"""Operations of a row in the network of ``make_model``: the first layer has no gradient of its input."""


class Scraper:
    """Reads the endpoint of a running fit from a thread, until it has figures of two ranks."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.text = ""
        self.names: set[str] = set()

    def __enter__(self) -> Scraper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.02):
            urls = re.findall(r"http://127\.0\.0\.1:\d+/metrics", self._caplog.text)
            if not urls:
                continue
            try:
                with urllib.request.urlopen(urls[0], timeout=60) as response:
                    text = response.read().decode()
            except OSError:
                return  # the fit has ended
            self.names |= {snapshot.name for snapshot in running_snapshots()}
            if 'rank="1"' in text:
                self.text = text


@pytest.mark.slow_elsewhere
def test_a_fit_is_watched_while_it_runs(frame: Any, tracked: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(
        seconds=0.1,
        port=0,
        tensorboard=str(tracked / "board"),
        trace=str(tracked / "steps.json"),
        trace_steps=(2, 4),
        peak_tflops=1.0,
    )
    estimator = make_estimator(tracked, tracking="on", runName="watched", monitor=monitor, epochs=40)
    with Scraper(caplog) as scraper:
        model = estimator.fit(frame)
    assert model.history[-1].rows == NUM_ROWS

    client = mlflow.MlflowClient()
    run_id = model.summary.run_id
    rates = client.get_metric_history(run_id, "system/fit/rows_per_s")
    assert [point.step for point in rates] == list(range(1, len(rates) + 1))
    metrics = client.get_run(run_id).data.metrics
    for rank in (0, 1):
        shares = [metrics[f"system/rank_{rank}/{name}"] for name in ("computing", "communicating", "reading")]
        assert sum(shares) == pytest.approx(1)
        assert metrics[f"system/rank_{rank}/processor_cores"] > 0
    best = max(point.value for point in client.get_metric_history(run_id, "system/fit/flops_per_s"))
    assert best == pytest.approx(FIRST_LAYERS * max(point.value for point in rates), rel=0.5)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked / "board")).Reload()
    assert len(events.Scalars("fit/rows_per_s")) == len(rates)

    assert 'sparkdl_ranks{fit="watched"} 2.0' in scraper.text
    assert 'sparkdl_rank_communicating_ratio{fit="watched",host=' in scraper.text
    assert "watched" in scraper.names
    assert "watched" not in {snapshot.name for snapshot in running_snapshots()}

    trace = json.loads((tracked / "steps.json").read_text())["traceEvents"]
    steps = {(event["pid"], event["name"]) for event in trace if event["name"].startswith("step ")}
    assert steps == {(rank, f"step {number}") for rank in (0, 1) for number in (2, 3, 4)}


@pytest.mark.any_spark_will_do
def test_a_monitor_that_cannot_be_opened_starts_no_rank(frame: Any, tmp_path: Path) -> None:
    monitor = Monitor(trace=str(tmp_path / "nowhere" / "trace.json"))
    with pytest.raises(ParamError, match="trace of the Monitor is .*cannot be written"):
        make_estimator(tmp_path, monitor=monitor).fit(frame)
