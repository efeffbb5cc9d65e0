"""The system metrics that a host reports about itself, with MLflow's names."""

from __future__ import annotations

import socket
import sys
import threading

import psutil
import torch
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

from sparkdl.training.remote.host_watch import HostWatch


def mlflows_names():
    found = set()
    for monitor in (CPUMonitor(), DiskMonitor(), NetworkMonitor()):
        monitor.collect_metrics()
        found |= set(monitor.metrics)
    return found


def reported():
    """The events of a watch from its first report to its end."""
    events, has_begun = [], threading.Event()

    def hear(event):
        events.append(event)
        has_begun.set()

    with HostWatch(hear, interval_s=600):
        assert has_begun.wait(30)
    return events


def test_host_watch_reports_the_system_metrics_of_mlflow_at_the_beginning_and_the_end():
    events = reported()
    assert len(events) == 2
    assert {event["kind"] for event in events} == {"system"}
    for event in events:
        hosts = {name.split("/")[1] for name in event["metrics"]}
        assert hosts == {socket.gethostname()}
        assert {name.split("/")[2] for name in event["metrics"]} == mlflows_names()
        assert 0 < event["metrics"][f"system/{socket.gethostname()}/system_memory_usage_percentage"] < 100


def test_without_psutil_nothing_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    events = []
    with HostWatch(events.append, interval_s=600):
        pass
    assert events == []


def test_report_that_fails_ends_the_watch_and_not_the_rank():
    def fail(event):
        raise ConnectionResetError("the task is gone")

    with HostWatch(fail, interval_s=600):
        pass


class NVMLError(Exception):
    """Like pynvml's error, which is no RuntimeError."""


def test_metrics_that_cannot_be_measured_are_left_out(monkeypatch):
    def fail(*args):
        raise OSError("no such disk")

    def not_supported(number):
        raise NVMLError("Not Supported")

    monkeypatch.setattr(psutil, "disk_usage", fail)
    monkeypatch.setattr(psutil, "net_io_counters", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (1_000_000, 4_000_000))
    monkeypatch.setattr(torch.cuda, "utilization", not_supported)
    events = reported()
    assert len(events) == 2
    for event in events:
        assert {name.split("/")[2] for name in event["metrics"]} == {
            "cpu_utilization_percentage",
            "system_memory_usage_megabytes",
            "system_memory_usage_percentage",
            "gpu_0_memory_usage_megabytes",
            "gpu_0_memory_usage_percentage",
        }
