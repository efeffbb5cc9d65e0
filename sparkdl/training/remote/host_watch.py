"""The load of a host while its ranks train, sampled under the names that MLflow uses.

The first rank of each host reports for all its ranks, over the link to the driver, which passes the samples to MLflow:
ranks need no access to the MLflow server. The samples of the host come from psutil, of the extra ``mlflow``; without
psutil nothing is reported. GPU memory is measured by torch, GPU load by nvidia-ml-py.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

_logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
"""Seconds from one sample to the next, as in MLflow."""


class HostWatch:
    """Reports samples of a host from a thread; a context manager. The last sample is taken when it exits.

    Args:
        report: function that is called with events of kind ``"system"``, which hold ``metrics``.
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
            _logger.info("psutil is not installed here, so the load of the host is not logged to MLflow.")
            return
        self._sample(probe)
        while not self._has_ended.wait(self._interval_s):
            self._sample(probe)
        self._sample(probe)

    def _sample(self, probe: _Probe) -> None:
        metrics = probe.measure()
        if not metrics:
            return
        try:
            self._report({"kind": "system", "metrics": metrics})
        except OSError:
            self._has_ended.set()  # the task has ended, and with it the receiver


class _Probe:
    """Measures the load of this host; network traffic is counted from when the object was made.

    Metrics that cannot be measured, such as traffic in a container without network interfaces, are left out; each
    failure is logged once.
    """

    def __init__(self) -> None:
        import psutil

        self._psutil = psutil
        # With only those characters that all of MLflow's stores accept.
        name = "".join(sign if sign.isalnum() or sign in "_-. " else "_" for sign in socket.gethostname())
        self._prefix = f"system/{name}"
        self._failed: set[str] = set()
        self._traffic: Any = None
        self._try("processor", psutil.cpu_percent)  # the next call measures the time since this one
        self._try("network", self._network)

    def measure(self) -> dict[str, float]:
        """Return the metrics, in megabytes and percent, by their names in MLflow."""
        load: dict[str, float] = {}
        for name, measure in (
            ("processor", lambda: {"cpu_utilization_percentage": self._psutil.cpu_percent()}),
            ("memory", self._memory),
            ("disk", self._disk),
            ("network", self._network),
        ):
            load |= self._try(name, measure) or {}
        for number in range(self._try("gpus", _num_gpus) or 0):
            load |= self._try(f"memory of GPU {number}", partial(_gpu_memory, number)) or {}
            load |= self._try(f"load of GPU {number}", partial(_gpu_load, number)) or {}
        return {f"{self._prefix}/{name}": round(float(value), 3) for name, value in load.items()}

    def _try(self, what: str, measure: Callable[[], Any]) -> Any:
        try:
            return measure()
        except Exception as error:  # of the kernel, psutil or NVML: none of them may end the fit
            if what not in self._failed:
                self._failed.add(what)
                _logger.info(
                    "This host's %s is not logged to MLflow, as it cannot be measured: %s: %s",
                    what,
                    type(error).__name__,
                    error,
                )
            return None

    def _memory(self) -> dict[str, float]:
        memory = self._psutil.virtual_memory()
        return {
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": memory.used / memory.total * 100,
        }

    def _disk(self) -> dict[str, float]:
        disk = self._psutil.disk_usage("/")
        return {
            "disk_usage_percentage": disk.percent,
            "disk_usage_megabytes": disk.used / 1e6,
            "disk_available_megabytes": disk.free / 1e6,
        }

    def _network(self) -> dict[str, float]:
        traffic = self._psutil.net_io_counters()  # None without interfaces
        if traffic is None:
            return {}
        before = self._traffic = self._traffic or traffic
        return {
            "network_receive_megabytes": (traffic.bytes_recv - before.bytes_recv) / 1e6,
            "network_transmit_megabytes": (traffic.bytes_sent - before.bytes_sent) / 1e6,
        }


def _num_gpus() -> int:
    """Return the number of GPUs that this rank sees; 0 if it does not use any."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_initialized() else 0


def _gpu_memory(number: int) -> dict[str, float]:
    import torch

    free, total = torch.cuda.mem_get_info(number)
    return {
        f"gpu_{number}_memory_usage_megabytes": (total - free) / 1e6,
        f"gpu_{number}_memory_usage_percentage": (total - free) / total * 100,
    }


def _gpu_load(number: int) -> dict[str, float]:
    """Return the load that nvidia-ml-py measures; it measures none for a part of a GPU (MIG)."""
    import torch

    return {f"gpu_{number}_utilization_percentage": torch.cuda.utilization(number)}
