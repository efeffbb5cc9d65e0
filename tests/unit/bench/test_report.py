"""Sizes, tables, rows and the report of a benchmark, without any measurement."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparkdl.bench import allreduce, step
from sparkdl.bench.allreduce import bytes_moved
from sparkdl.bench.contenders.allreduce import AllreduceTrial, Contender
from sparkdl.bench.contest import Case, Measurements
from sparkdl.bench.libraries import LIBRARIES
from sparkdl.bench.report import (
    format_size,
    format_table,
    format_time,
    parse_size,
    percentile,
    plot_bandwidth,
    plot_steps,
    show,
)
from sparkdl.collective.telemetry.communication_report import format_columns
from sparkdl.errors import CommunicatorError, ParamError

CASES = allreduce.make_cases("1KiB,1MiB", "", 2)
TIMES = {
    "copy": ([1e-6, 1e-6], [1e-4, 3e-4]),
    "native": ([2e-6, 4e-6], [4e-4, 4e-4]),
    "torch": ([4e-6, 8e-6], [8e-4, 8e-4]),
    "gloo": ([3e-4, 3e-4], [2e-3, 2e-3]),
}
MEASURED = {
    case.name: {contender: Measurements(times=times[index]) for contender, times in TIMES.items()}
    for index, case in enumerate(CASES)
}

STEP = Case(name="step of 25M", settings={"model": "25M", "rows": 2})


def steps(**times: list[float]) -> dict[str, dict[str, Measurements]]:
    """Steps of contenders whose ranks all ended with the same parameters."""
    result = {"checksum": 1.5, "bytes": 100, "tensors": 3}
    measured = {
        name: Measurements(times=seconds, results=[[result, result]]) for name, seconds in times.items()
    }
    return {STEP.name: measured}


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("512B", 512), ("1KiB", 1024), ("64MiB", 2**26), ("2GiB", 2**31)]
)
def test_sizes_are_read_as_they_are_written(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes
    assert format_size(num_bytes) == text


@pytest.mark.parametrize("text", ["", "0", "-1KiB", "1KB", "MiB", "1.5MiB"])
def test_sizes_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ParamError, match="not understood"):
        parse_size(text)


def test_percentile_is_the_nearest_rank_above() -> None:
    values = [float(value) for value in range(10, 0, -1)]
    assert percentile(values, 0.9) == 9.0
    assert percentile(values, 0.91) == 10.0
    assert percentile([5.0], 0.9) == 5.0


def test_rows_relate_every_contender_to_the_others_and_to_a_copy() -> None:
    rows = {(row["contender"], row["bytes"]): row for row in allreduce.make_rows(CASES, MEASURED, 4)}
    native = rows["native", 2**20]
    assert native["case"] == "allreduce 1MiB"
    assert native["repetitions"] == 2
    assert native["percent_of_copy"] == pytest.approx(50.0)
    assert native["ratio"]["gloo"] == pytest.approx(5.0)
    assert native["bus_bandwidth_bytes_per_s"] == pytest.approx(2**20 / 4e-4 * 1.5)
    assert rows["native", 1024]["p90_s"] == 4e-6


def test_table_says_how_much_faster_ours_are() -> None:
    lines = format_table(allreduce.make_rows(CASES, MEASURED, 2), allreduce.COLUMNS).splitlines()
    assert lines[0].split()[:3] == ["case", "contender", "median"]
    gloo = next(line for line in lines if line.startswith("allreduce 1KiB") and "gloo" in line)
    assert gloo.endswith("100.00x    50.00x")


def test_columns_of_a_table_are_as_wide_as_their_widest_cell() -> None:
    assert format_columns(["a", "bb", "c"], [["long", "x", "12345"]]) == "a     bb      c\nlong  x   12345"


@pytest.mark.parametrize(
    ("time_s", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4e-6, "4 us"), (2.7e-7, "0.27 us")]
)
def test_times_are_written_with_a_fitting_unit(time_s: float, text: str) -> None:
    assert format_time(time_s) == text


def test_unknown_contender_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ParamError, match=r"carrier-pigeon.*gloo, mpi"):
        allreduce.choose_contenders("gloo,carrier-pigeon")


def test_contender_that_is_not_installed_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mpi4py", None)
    contenders, missing = allreduce.choose_contenders("gloo,mpi,impi")
    found = [name for name in contenders if name != "horovod"]
    assert found == ["native", "arena", "torch", "gloo", "gloo tuned"]
    assert set(missing) - {"horovod"} == {"mpi", "intel mpi"}
    assert "pip install mpi4py" in missing["mpi"]


def test_library_whose_own_folder_is_missing_is_named_with_the_command_that_fills_it(tmp_path: Path) -> None:
    library = dataclasses.replace(LIBRARIES["intel mpi"], file=tmp_path / "libmpi.so.12")
    assert re.search(r"libmpi\.so\.12 is missing.*pip install .*impi-rt", library.why_missing() or "")


def test_report_holds_command_machine_rows_and_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    rows = allreduce.make_rows(CASES, MEASURED, 2)
    options = argparse.Namespace(json=path, plot=None)
    missing = {"mpi": "mpi4py is not installed"}
    show("allreduce", rows, allreduce.COLUMNS, options, legend="", missing=missing)
    report = json.loads(path.read_text())
    assert set(report) == {"benchmark", "command", "machine", "rows", "missing"}
    assert {"cores", "memory_bytes", "gpu", "versions"} <= set(report["machine"])
    assert report["rows"] == rows
    assert report["missing"] == {"mpi": "mpi4py is not installed"}


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    path = tmp_path / "plot.svg"
    plot_bandwidth(allreduce.make_rows(CASES, MEASURED, 2), path)
    assert "native" in path.read_text()
    plot_steps(step.make_rows([STEP], steps(alone=[0.1], DataParallel=[0.125]), 2), path)
    assert "DataParallel" in path.read_text()


def test_queued_tensors_are_a_case_of_their_own() -> None:
    cases = allreduce.make_cases("1KiB,1KiB", "100x256KiB", 2)
    assert [case.name for case in cases] == ["allreduce 1KiB", "100 allreduces of 256KiB, queued"]
    assert cases[1].settings == {"num_bytes": 2**18, "num_tensors": 100, "num_buffers": 2}
    with pytest.raises(ParamError, match="0x1KiB"):
        allreduce.make_cases("1KiB", "0x1KiB", 2)


def test_cases_of_large_buffers_have_one_operation_per_repetition() -> None:
    cases = allreduce.make_cases("512KiB,1MiB", "100x256KiB", 2)
    assert [case.max_operations == 1 for case in cases] == [False, True, True]


def test_trial_cycles_through_the_requested_number_of_buffers() -> None:
    seen: list[int] = []
    communicator = SimpleNamespace(rank=0, world_size=1)
    contender = Contender(
        allreduce=lambda array: seen.append(array.ctypes.data), allreduce_queued=lambda _: None
    )
    [case] = allreduce.make_cases("1KiB", "", 3)
    trial = AllreduceTrial(communicator, contender, **case.settings)
    for repetition in range(2):
        trial.prepare(repetition, 4)
        trial.run(4)
    assert len(set(seen)) == 3
    assert seen == (seen[:3] * 3)[:8]


def test_bytes_moved_are_those_of_the_algorithms() -> None:
    assert bytes_moved("copy", 2**20, 1, 2) == 2 * 2**20
    assert bytes_moved("arena", 2**20, 1, 4) == 2 * 2**20
    assert bytes_moved("gloo", 2**20, 1, 2) == 5.5 * 2**20
    assert bytes_moved("native", 2**20, 1, 2) == 5 * 2**20
    assert bytes_moved("native", 2**20, 1, 4) == 4.75 * 2**20
    assert bytes_moved("native", 1024, 100, 2) == 5 * 1024 * 100
    assert bytes_moved("mpi", 1024, 1, 2) is None


def test_communication_share_is_the_time_added_to_a_step_on_one_rank() -> None:
    measured = steps(alone=[0.1], DataParallel=[0.125], quick=[0.09])
    rows = {row["contender"]: row for row in step.make_rows([STEP], measured, 2)}
    assert rows["DataParallel"]["communication_share"] == pytest.approx(0.2)
    assert rows["quick"]["communication_share"] == 0.0
    assert rows["alone"]["ratio"]["DataParallel"] == pytest.approx(1.25)
    assert rows["alone"]["bytes"] == 100


def test_ranks_that_end_a_step_with_different_parameters_are_an_error() -> None:
    measured = steps(alone=[0.1], gloo=[0.1])
    measured[STEP.name]["gloo"].results = [[{"checksum": 1.0}, {"checksum": 2.0}]]
    with pytest.raises(CommunicatorError, match=r"gloo, step of 25M: .* \[1.0, 2.0\]"):
        step.make_rows([STEP], measured, 2)
