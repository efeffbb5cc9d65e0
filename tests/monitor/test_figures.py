"""The figures that a rank gets without communication: efficiency, bandwidth, throughput, memory."""

from __future__ import annotations

import mmap
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparkdl.errors import ParamError
from sparkdl.host_memory import _container_memory
from sparkdl.monitor import compute_throughput, get_gpu_memory_stats, monitor_communication
from tests.monitor import figure_checks
from tests.monitor.figure_checks import ELEMENTS, LATE_S
from tests.run_ranks import run_ranks

SUM_BYTES = 4 * ELEMENTS


@cache
def figures() -> list[dict[str, Any]]:
    return run_ranks(3, figure_checks.compare_figures)


def test_figures_cover_the_time_since_the_last_call() -> None:
    for figures_of_rank in figures():
        assert figures_of_rank["summed"]["count"] == 4
        assert figures_of_rank["summed"]["bytes"] == 4 * SUM_BYTES
        assert figures_of_rank["late"]["count"] == 1
        assert figures_of_rank["nothing"]["count"] == 0
        assert figures_of_rank["nothing"]["efficiency"] == 1.0
        assert figures_of_rank["nothing"]["bus_bandwidth"] == 0.0


def test_waiting_for_a_late_rank_lowers_the_efficiency_of_the_others_alone() -> None:
    first, second, late = (figures_of_rank["late"] for figures_of_rank in figures())
    for waiting in (first, second):
        assert waiting["exposed_s"] > 0.5 * LATE_S
        assert waiting["waiting_s"] > 0.5 * LATE_S
        assert waiting["waiting_s"] > late["waiting_s"]
        assert waiting["efficiency"] < late["efficiency"]


def test_bandwidth_is_a_share_of_that_of_a_copy_inside_a_host() -> None:
    for figures_of_rank in figures():
        summed = figures_of_rank["summed"]
        assert summed["bus_bandwidth"] > 0
        assert summed["link_bandwidth"] > 0
        assert summed["bandwidth_share"] == summed["bus_bandwidth"] / summed["link_bandwidth"]


def test_process_set_has_figures_of_its_own() -> None:
    of_ranks = [figures_of_rank["pair"] for figures_of_rank in figures()]
    assert [figures_of_rank["count"] for figures_of_rank in of_ranks] == [1, 1, 0]
    assert [figures_of_rank["ranks"] for figures_of_rank in of_ranks] == [[0, 1]] * 3


def test_figures_go_on_after_a_report_that_resets_the_counts() -> None:
    for figures_of_rank in figures():
        assert figures_of_rank["after reset"]["bytes"] == SUM_BYTES
        assert figures_of_rank["after reset"]["seconds"] > 0


def test_throughput_is_that_of_all_ranks() -> None:
    assert [figures_of_rank["rows"] for figures_of_rank in figures()] == [3 * 32 / 0.5] * 3
    assert compute_throughput(32, 0.5) == 64  # a process without other ranks


def test_horovods_names_take_process_sets() -> None:
    of_ranks = run_ranks(3, figure_checks.use_horovods_names)
    assert [figures_of_rank["evens"]["bytes"] for figures_of_rank in of_ranks] == [SUM_BYTES, 0, SUM_BYTES]
    assert all(figures_of_rank["all"]["bytes"] >= 2 * SUM_BYTES for figures_of_rank in of_ranks)
    assert [figures_of_rank["rows"] for figures_of_rank in of_ranks] == pytest.approx([300.0] * 3)
    assert all(figures_of_rank["memory"]["process_bytes"] > 0 for figures_of_rank in of_ranks)


def test_a_process_without_other_ranks_waits_for_none() -> None:
    alone = monitor_communication()
    assert (alone.efficiency, alone.count, alone.link_bandwidth, alone.bandwidth_share) == (
        1.0,
        0,
        None,
        None,
    )


@pytest.mark.parametrize("process_set", ["world", 3, [], [0.5]])
def test_what_is_no_process_set_is_refused(process_set: object) -> None:
    with pytest.raises(ParamError, match=r"takes an hvd\.ProcessSet, a communicator"):
        monitor_communication(process_set)


@pytest.mark.parametrize(("rows", "seconds"), [(1, 0), (1, -1), (-1, 1), (1, float("nan"))])
def test_impossible_iterations_are_refused(rows: float, seconds: float) -> None:
    with pytest.raises(ParamError, match="batch_size="):
        compute_throughput(rows, seconds)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the process may have initialized CUDA")
def test_memory_is_that_of_the_process_and_its_host() -> None:
    before = get_gpu_memory_stats()
    memory = mmap.mmap(-1, 64 << 20)  # not from an allocator, which may have freed memory at hand
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1
    after = get_gpu_memory_stats()
    assert after.gpus == ()
    assert after.host.process_bytes - before.host.process_bytes > 0.9 * len(array)
    assert after.host.peak_bytes >= after.host.process_bytes
    assert 0 < after.host.available_bytes < after.host.total_bytes
    assert after.as_dict()["host"]["total_bytes"] == after.host.total_bytes


def test_files_that_a_container_has_cached_and_not_read_lately_are_not_used_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 100\nfile 800\ninactive_file 700\nactive_file 100\n")
    assert _container_memory(tmp_path) == (1000, 200)
    (tmp_path / "memory.max").write_text("max\n")
    assert _container_memory(tmp_path) is None
