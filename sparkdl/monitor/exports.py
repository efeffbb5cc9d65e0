"""Where the driver writes figures: MLflow, TensorBoard, an endpoint for Prometheus, and the file of ``sparkdl top``.

The endpoint answers on loopback alone, and only if a port is set. The file can be read only by its user.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import secrets
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import IO, TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from sparkdl.errors import ParamError
from sparkdl.foreign_errors import needing
from sparkdl.monitor.board import Export, RankFigures, Snapshot
from sparkdl.rendezvous.addresses import LOOPBACK

if TYPE_CHECKING:
    from sparkdl.monitor.settings import Monitor

_logger = logging.getLogger(__name__)

_CLOSE_S = 10.0
"""The end of a fit waits for so long for an export, such as one to a folder on a network that hangs."""

_MOST_CONNECTIONS, _CONNECTION_S = 32, 5.0
"""Open connections to the endpoint, and the longest silence on one: every process of the machine can connect."""

_MOST_WAITING = 100
"""An export that is so many snapshots behind has failed."""

FIGURES = (
    ("rows_per_s", "rows_per_second", "Rows per second."),
    ("tokens_per_s", "tokens_per_second", "Tokens per second."),
    ("flops_per_s", "model_flops_per_second", "Floating point operations of the model per second."),
    ("utilization", "model_flops_utilization_ratio", "Operations of the model as a share of the peak."),
    ("reading", "reading_ratio", "Share of the time in which ranks waited for data."),
    (
        "communicating",
        "communicating_ratio",
        "Share of the time in which ranks were blocked in communication.",
    ),
    ("computing", "computing_ratio", "Share of all other time."),
    (
        "efficiency",
        "communication_efficiency_ratio",
        "Share of the time in which ranks are not blocked in communication.",
    ),
    ("slowness", "slowness_ratio", "Time for a row, as a multiple of the median of the other ranks."),
)
"""Figures of all ranks: name, name at the endpoint, and description."""

RANK_FIGURES = (
    *(figure for figure in FIGURES if figure[0] != "efficiency"),
    ("steps_per_s", "steps_per_second", "Steps per second."),
    ("bandwidth", "bus_bandwidth_bytes_per_second", "Bytes per second that links carry in operations."),
    ("bandwidth_share", "bus_bandwidth_ratio", "Reached share of the link's bandwidth."),
    ("processor_cores", "processor_cores", "Cores that the process used."),
    ("memory_bytes", "memory_bytes", "Resident memory of the process."),
    ("gpu_memory_bytes", "gpu_memory_bytes", "Used memory of the GPU."),
    ("gpu_load", "gpu_load_ratio", "Load of the GPU."),
)
"""Figures of one rank."""


_POSITIONS = (
    ("ranks", "ranks", "Number of ranks."),
    *((name, name, f"The {name} of rank 0.") for name in ("epoch", "step", "loss")),
)
"""What the endpoint has of a fit, besides its figures."""


def rank_values(figures: RankFigures) -> dict[str, float]:
    """Return the figures of a rank by name; those that are not known are left out."""
    values = {name: getattr(figures, name) for name, _, _ in RANK_FIGURES}
    return {name: float(value) for name, value in values.items() if value is not None}


def flat(snapshot: Snapshot) -> dict[str, float]:
    """Return all figures by name, such as ``fit/rows_per_s`` and ``rank_0/rows_per_s``."""
    groups = {"fit": snapshot.totals()} | {
        f"rank_{rank}": rank_values(figures) for rank, figures in snapshot.ranks.items()
    }
    return {f"{group}/{name}": value for group, figures in groups.items() for name, value in figures.items()}


def open_exports(settings: Monitor, log_metrics: Callable[[int, dict[str, float]], None]) -> list[Export]:
    """Open the exports of a monitor.

    Args:
        settings: settings of the monitor.
        log_metrics: function that logs to MLflow; it gets the number of a sample, and figures by name.

    Raises:
        ParamError: if a library is missing, a folder cannot be written or the port is taken.
    """
    with ExitStack() as opened:
        exports: list[Export] = [MlflowExport(log_metrics), StatusFile()]
        opened.callback(exports[-1].close)
        if settings.tensorboard is not None:
            exports.append(TensorBoardExport(settings.tensorboard))
            opened.callback(exports[-1].close)
        if settings.port is not None:
            exports.append(Endpoint(settings.port))
        opened.pop_all()
        return exports


@dataclass(frozen=True)
class MlflowExport:
    """Logs figures as ``system/fit/<name>`` and ``system/rank_<number>/<name>``."""

    log_metrics: Callable[[int, dict[str, float]], None]

    def show(self, snapshot: Snapshot) -> None:
        """Log a snapshot under its number."""
        if figures := flat(snapshot):
            self.log_metrics(snapshot.number, {f"system/{name}": value for name, value in figures.items()})

    def close(self) -> None:
        """Do nothing: the run of MLflow is not the monitor's."""


class TensorBoardExport:
    """Writes figures to a folder for TensorBoard, on a thread of its own: a slow disk does not slow down the fit.

    Raises:
        ParamError: if tensorboard is not installed, or the folder cannot be written.
    """

    def __init__(self, folder: str) -> None:
        with needing("tensorboard of the Monitor", "monitor", "tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        try:
            self._writer = SummaryWriter(folder)
        except OSError as error:
            raise ParamError(
                f"tensorboard of the Monitor is {folder!r}: {error}. Choose another folder."
            ) from error
        self._waiting: queue.Queue[Snapshot | None] = queue.Queue(_MOST_WAITING)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="sparkdl-tensorboard", daemon=True)
        self._thread.start()

    def show(self, snapshot: Snapshot) -> None:
        """Write a snapshot; raise the error of an earlier one."""
        if self._error is not None:
            raise self._error
        try:
            self._waiting.put_nowait(snapshot)
        except queue.Full:
            raise TimeoutError(
                f"{self._waiting.maxsize} snapshots wait to be written; its disk may be slow or hang"
            ) from None

    def close(self) -> None:
        """Write what is left."""
        with suppress(queue.Full):  # the thread hangs
            self._waiting.put_nowait(None)
        _join(self._thread)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (snapshot := self._waiting.get()) is not None:
                self._write(snapshot)
            self._writer.close()
        except Exception as error:  # of a disk or the library; the caller gets it
            self._error = error

    def _write(self, snapshot: Snapshot) -> None:
        """Write a snapshot at the step of the fit, or at its own number if there is none."""
        step, position = snapshot.number, snapshot.position
        if "steps" in position:
            step = round((position["epoch"] - 1) * position["steps"] + position["step"])
        for name, value in flat(snapshot).items():
            self._writer.add_scalar(name, value, step, walltime=snapshot.at)
        if "loss" in position:
            self._writer.add_scalar("fit/loss", position["loss"], step)
        self._writer.flush()


def _join(thread: threading.Thread) -> None:
    thread.join(_CLOSE_S)
    if thread.is_alive():
        raise TimeoutError(f"it has not ended after {_CLOSE_S:g} s")


class _MetricsHandler(WSGIRequestHandler):
    timeout = _CONNECTION_S

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers each connection in a thread; when there are too many, the oldest ends."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *args: Any) -> None:
        self._open: deque[socket.socket] = deque()
        self._lock = threading.Lock()
        super().__init__(*args)

    def get_request(self) -> tuple[socket.socket, Any]:
        sock, address = super().get_request()
        with self._lock:
            self._open.append(sock)
            if len(self._open) > _MOST_CONNECTIONS:
                with suppress(OSError):  # its peer has ended it
                    self._open.popleft().shutdown(socket.SHUT_RDWR)  # its thread closes it
        return sock, address

    def shutdown_request(self, request: Any) -> None:
        with self._lock, suppress(ValueError):  # it was one too many
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, *_: object) -> None:
        """Print nothing: a peer was silent or is gone."""


class Endpoint:
    """Serves the latest figures at ``http://127.0.0.1:<port>/metrics``, as text of OpenMetrics.

    Args:
        port: port on loopback; 0 for any free one.

    Attributes:
        port: the port.

    Raises:
        ParamError: if prometheus_client is not installed, or the port is taken.
    """

    def __init__(self, port: int) -> None:
        with needing("port of the Monitor", "monitor", "prometheus_client"):
            from prometheus_client import CollectorRegistry, make_wsgi_app
        self._snapshot: Snapshot | None = None
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server = make_server(
                LOOPBACK, port, make_wsgi_app(registry), _MetricsServer, _MetricsHandler
            )
        except OSError as error:
            raise ParamError(
                f"port of the Monitor is {port}, at which nothing can listen: {error}. Choose another one, or 0."
            ) from error
        self.port = int(self._server.server_port)
        threading.Thread(target=self._server.serve_forever, name="sparkdl-endpoint", daemon=True).start()
        level = logging.INFO if port else logging.WARNING  # a port that was not chosen has to be shown
        _logger.log(level, "The figures of this monitor are at http://%s:%d/metrics", LOOPBACK, self.port)

    def show(self, snapshot: Snapshot) -> None:
        """Serve a snapshot from now on."""
        self._snapshot = snapshot

    def collect(self) -> Iterator[Any]:
        """Yield the latest figures; prometheus_client calls this at each request."""
        from prometheus_client.core import GaugeMetricFamily

        snapshot = self._snapshot
        if snapshot is None:
            return

        def family(name: str, description: str, values: Mapping[tuple[str, ...], float]) -> Any:
            labels = ["fit", "rank", "host"] if name.startswith("rank_") else ["fit"]
            metric = GaugeMetricFamily(f"sparkdl_{name}", description, labels=labels)
            for label, value in values.items():
                metric.add_metric([snapshot.name, *label], value)
            return metric

        of_fit = snapshot.totals() | dict(snapshot.position) | {"ranks": len(snapshot.ranks)}
        for name, exported, description in (*FIGURES, *_POSITIONS):
            if name in of_fit:
                yield family(exported, description, {(): of_fit[name]})
        ranks: dict[tuple[str, ...], dict[str, float]] = {
            (str(rank), figures.host): rank_values(figures) for rank, figures in snapshot.ranks.items()
        }
        for name, exported, description in RANK_FIGURES:
            known = {label: values[name] for label, values in ranks.items() if name in values}
            yield family(f"rank_{exported}", description, known)

    def close(self) -> None:
        """Stop serving."""
        ending = threading.Thread(target=self._server.shutdown, daemon=True)  # it waits without a deadline
        ending.start()
        _join(ending)
        self._server.server_close()


class StatusFile:
    """Keeps the latest snapshot in a file of :func:`status_folder`, until it is closed.

    The process has a lock on the file (flock(2)), which ends with the process however that ends:
    :func:`status_files` removes files without one.
    """

    def __init__(self) -> None:
        self._path = status_folder(makes=True) / f"{os.getpid()}-{secrets.token_hex(4)}.json"
        self._file: IO[str] | None = None

    def show(self, snapshot: Snapshot) -> None:
        """Replace the content by a snapshot."""
        before, part = self._file, self._path.with_suffix(".part")
        self._file = part.open("w", encoding="utf-8")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        json.dump(asdict(snapshot), self._file)
        self._file.flush()
        part.replace(self._path)
        if before is not None:  # not earlier: the file always has a lock
            before.close()

    def close(self) -> None:
        """Remove the file."""
        self._path.with_suffix(".part").unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)
        if self._file is not None:
            self._file.close()


def status_files(pid: int | None = None) -> Iterator[IO[str]]:
    """Yield the open files of this user's running monitors; remove those whose processes have ended.

    Args:
        pid: process id of the driver; None for all.
    """
    for path in status_folder().glob("*.json" if pid is None else f"{pid}-*.json"):
        with suppress(FileNotFoundError), path.open(encoding="utf-8") as file:  # it may have ended meanwhile
            if _is_left(file, path):
                path.unlink()
            else:
                yield file


def _is_left(file: IO[str], path: Path) -> bool:
    """Whether no process has a lock on the file; one that a newer file has replaced has a process."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.path.samestat(os.fstat(file.fileno()), path.stat())


def status_folder(*, makes: bool = False) -> Path:
    """Return the folder of this user's running monitors on this machine, which no other user can read.

    Args:
        makes: whether to make the folder if there is none.

    Raises:
        ParamError: if it belongs to another user, or cannot be made.
    """
    try:
        folder = Path(tempfile.gettempdir()) / f"sparkdl-monitor-{os.getuid()}"
        if makes:
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ParamError(
            f"The folder in which a monitor keeps its figures cannot be made: {error}. Set TMPDIR to a folder that "
            "can be written."
        ) from error
    if not folder.is_symlink() and not folder.exists():
        return folder
    about = folder.lstat()
    if folder.is_symlink() or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise ParamError(
            f"{folder}, in which a monitor keeps its figures, is not this user's alone. Remove it, or set TMPDIR to "
            "another folder."
        )
    return folder
