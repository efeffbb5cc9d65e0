"""What a host is busy with while its ranks train, by the names that MLflow has for it. Runs on a *rank*.

The first rank of each host reports for all of them, over the link to the driver, which tells MLflow: no rank needs a
way to the server. psutil, of the extra ``mlflow``, knows the host; without it nothing is reported. A GPU's memory torch
knows itself, its load nvidia-ml-py.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

INTERVAL_S = 10.0
"""From one sample to the next, as MLflow has it."""

_logger = logging.getLogger(__name__)


class HostWatch:
    """Reports samples of a host from a thread; a context manager. The last sample is taken at its end.

    Args:
        report: takes events of kind ``"system"`` with ``sample``, their number, and ``metrics``.
        interval_s: seconds from one sample to the next.
    """

    def __init__(self, report: Callable[[dict[str, Any]], None], *, interval_s: float = INTERVAL_S) -> None:
        self._report, self._interval_s = report, interval_s
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparkdl-host-watch", daemon=True)

    def __enter__(self) -> HostWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            probe = _Probe()
        except ImportError:
            _logger.info("psutil is not installed here, so MLflow is not told how busy the host is.")
            return
        number = 0
        while not self._has_ended.wait(self._interval_s if number else 0.0) or number == 0:
            self._sample(probe, number)
            number += 1
        if number:
            self._sample(probe, number)

    def _sample(self, probe: _Probe, number: int) -> None:
        try:
            self._report({"kind": "system", "sample": number, "metrics": probe.measure()})
        except OSError:
            self._has_ended.set()  # the task is gone, and with it whoever would hear


class _Probe:
    """Knows how busy this host is; traffic counts from its making."""

    def __init__(self) -> None:
        import psutil

        self._psutil = psutil
        self._prefix = f"system/{_as_name(socket.gethostname())}"
        self._traffic = psutil.net_io_counters()
        psutil.cpu_percent()  # the next one tells of the time since

    def measure(self) -> dict[str, float]:
        """Return metrics by the names of MLflow, in megabytes and percent."""
        psutil = self._psutil
        memory, disk, traffic = psutil.virtual_memory(), psutil.disk_usage("/"), psutil.net_io_counters()
        found = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": memory.used / memory.total * 100,
            "disk_usage_percentage": disk.percent,
            "disk_usage_megabytes": disk.used / 1e6,
            "disk_available_megabytes": disk.free / 1e6,
            "network_receive_megabytes": (traffic.bytes_recv - self._traffic.bytes_recv) / 1e6,
            "network_transmit_megabytes": (traffic.bytes_sent - self._traffic.bytes_sent) / 1e6,
            **_gpus(),
        }
        return {f"{self._prefix}/{name}": round(float(value), 3) for name, value in found.items()}


def _gpus() -> dict[str, float]:
    """The memory of the GPUs that this rank sees; their load where nvidia-ml-py is installed."""
    import torch

    found: dict[str, float] = {}
    if not torch.cuda.is_initialized():
        return found
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        found[f"gpu_{number}_memory_usage_megabytes"] = (total - free) / 1e6
        found[f"gpu_{number}_memory_usage_percentage"] = (total - free) / total * 100
        try:
            found[f"gpu_{number}_utilization_percentage"] = torch.cuda.utilization(number)
        except (ModuleNotFoundError, RuntimeError):
            pass  # NVML is not there
    return found


def _as_name(host: str) -> str:
    """A host's name in the signs that all of MLflow's stores take."""
    return "".join(sign if sign.isalnum() or sign in "_-. " else "_" for sign in host)
