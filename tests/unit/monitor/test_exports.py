"""What the driver writes, read back: TensorBoard's files, the endpoint over HTTP, MLflow's metrics, the status file."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from sparkdl.errors import ParamError
from sparkdl.monitor import Monitor
from sparkdl.monitor.board import Snapshot, figures_of
from sparkdl.monitor.exports import FIGURES, RANK_FIGURES, Endpoint, StatusFile, open_exports, status_folder
from tests.unit.monitor.samples import sample

pytest.importorskip("prometheus_client")
pytest.importorskip("tensorboard")

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana_dashboard.json"

SNAPSHOT = Snapshot(
    name="fit of digits",
    number=7,
    at=1000.5,
    began_at=990.0,
    position={"epoch": 2, "epochs": 3, "step": 4, "steps": 10, "loss": 0.5, "eta_s": 9.0},
    ranks=figures_of({0: sample(0), 1: sample(1, communicating_s=1.0)}),
)


@pytest.fixture(autouse=True)
def folder_of_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def shown(settings: Monitor) -> list[tuple[int, dict[str, float]]]:
    logged: list[tuple[int, dict[str, float]]] = []
    exports = open_exports(settings, lambda number, metrics: logged.append((number, metrics)))
    for export in exports:
        export.show(SNAPSHOT)
        export.close()
    return logged


def test_mlflow_gets_the_figures_of_the_fit_and_of_each_rank() -> None:
    ((number, metrics),) = shown(Monitor())
    assert number == 7
    assert metrics["system/fit/rows_per_s"] == 80
    assert metrics["system/fit/efficiency"] == 0.625
    assert metrics["system/rank_1/communicating"] == 0.5
    assert metrics["system/rank_1/memory_bytes"] == 1 << 30
    assert not any("gpu" in name or "tokens" in name for name in metrics)  # not known here


def test_tensorboard_reads_the_figures_at_the_step_of_the_fit(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown(Monitor(tensorboard=str(tmp_path / "board")))
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    (point,) = events.Scalars("fit/rows_per_s")
    assert (point.step, point.value, point.wall_time) == (14, 80, 1000.5)
    assert events.Scalars("rank_0/reading")[0].value == 0.25
    assert events.Scalars("fit/loss")[0].value == 0.5


def scrape(port: int, host: str = "127.0.0.1") -> str:
    request = urllib.request.Request(
        f"http://{host}:{port}/metrics", headers={"Accept": "application/openmetrics-text"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        return response.read().decode()


def test_prometheus_reads_the_endpoint_as_openmetrics() -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    endpoint = Endpoint(0)
    try:
        assert list(text_string_to_metric_families(scrape(endpoint.port))) == []
        endpoint.show(SNAPSHOT)
        families = {family.name: family for family in text_string_to_metric_families(scrape(endpoint.port))}
    finally:
        endpoint.close()
    (rows,) = families["sparkdl_rows_per_second"].samples
    assert (rows.labels, rows.value) == ({"fit": "fit of digits"}, 80)
    waits = {one.labels["rank"]: one.value for one in families["sparkdl_rank_communicating_ratio"].samples}
    assert waits == {"0": 0.25, "1": 0.5}
    assert families["sparkdl_rank_memory_bytes"].samples[0].labels["host"] == "host-0"
    assert families["sparkdl_loss"].samples[0].value == 0.5


def test_the_endpoint_listens_on_loopback_alone_and_until_it_is_closed() -> None:
    endpoint = Endpoint(0)
    bound: Any = endpoint._server.socket.getsockname()
    endpoint.close()
    assert bound[0] == "127.0.0.1"
    with pytest.raises(OSError):
        scrape(endpoint.port)


def test_silent_connections_to_the_endpoint_are_bounded_and_delay_no_scrape() -> None:
    endpoint, num_threads = Endpoint(0), threading.active_count()
    strangers = [socket.create_connection(("127.0.0.1", endpoint.port), timeout=5) for _ in range(200)]
    try:
        endpoint.show(SNAPSHOT)
        assert "sparkdl_ranks" in scrape(endpoint.port)
        assert threading.active_count() <= num_threads + 40
        assert strangers[0].recv(1) == b""
    finally:
        for stranger in strangers:
            stranger.close()
        endpoint.close()


def test_without_a_port_nothing_listens() -> None:
    exports = open_exports(Monitor(), lambda _, __: None)
    for export in exports:
        export.close()
    assert not any(isinstance(export, Endpoint) for export in exports)


def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            ParamError, match=rf"port of the Monitor is {port}, .* Choose another one, or 0\."
        ):
            open_exports(Monitor(port=port), lambda _, __: None)


@pytest.mark.parametrize(
    ("setting", "package", "module"),
    [
        ({"port": 0}, "prometheus_client", "prometheus_client"),
        ({"tensorboard": "board"}, "tensorboard", "torch.utils.tensorboard"),
    ],
)
def test_a_missing_library_is_named(
    setting: dict[str, Any], package: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    what = f"{next(iter(setting))} of the Monitor needs {package}"
    with pytest.raises(ParamError, match=f"{what}: .*pip install {package}, .*extra 'monitor'"):
        open_exports(Monitor(**setting), lambda _, __: None)
    assert list(status_folder().iterdir()) == []  # what was opened before is closed


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ParamError, match="tensorboard of the Monitor is .*file"):
        open_exports(Monitor(tensorboard=str(tmp_path / "file" / "board")), lambda _, __: None)


def test_the_status_file_has_the_latest_snapshot_until_it_is_closed() -> None:
    file = StatusFile()
    file.show(SNAPSHOT)
    (path,) = status_folder().iterdir()
    assert path.name.startswith(f"{os.getpid()}-")
    assert Snapshot.from_fields(json.loads(path.read_text())) == SNAPSHOT
    assert stat.S_IMODE(status_folder().stat().st_mode) == 0o700
    file.close()
    assert list(status_folder().iterdir()) == []


def test_a_status_folder_that_others_can_read_is_refused() -> None:
    status_folder(makes=True).chmod(0o755)
    with pytest.raises(ParamError, match="is not this user's alone"):
        StatusFile()


def test_a_status_folder_that_cannot_be_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ParamError, match="cannot be made: .*nowhere.* Set TMPDIR"):
        StatusFile()


def test_a_trace_that_cannot_be_written_leaves_nothing_open(tmp_path: Path) -> None:
    threads = threading.active_count()
    with pytest.raises(ParamError, match="trace of the Monitor"):
        Monitor(port=0, trace=str(tmp_path / "nowhere" / "trace")).on_driver("fit", lambda _, __: None)
    assert threading.active_count() == threads


def test_the_dashboard_shows_metrics_that_the_endpoint_has() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    shown = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\bsparkdl_\w+", target["expr"])
    }
    exported = {f"sparkdl_{name}" for _, name, _ in FIGURES} | {
        f"sparkdl_rank_{name}" for _, name, _ in RANK_FIGURES
    }
    exported |= {"sparkdl_ranks", "sparkdl_epoch", "sparkdl_step", "sparkdl_loss"}
    assert shown <= exported
    # What a GPU, a link and tokens add is shown, too; the efficiency is what communication leaves over.
    assert exported - shown == {
        "sparkdl_communication_efficiency_ratio",
        "sparkdl_slowness_ratio",
        "sparkdl_rank_bus_bandwidth_ratio",
        "sparkdl_rank_computing_ratio",
        "sparkdl_rank_model_flops_per_second",
        "sparkdl_rank_rows_per_second",
        "sparkdl_rank_steps_per_second",
        "sparkdl_rank_tokens_per_second",
    }
    places = [tuple(panel["gridPos"][side] for side in ("x", "y")) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
