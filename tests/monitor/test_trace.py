"""A trace of some steps has all ranks, torch's operators and the collectives between them, on one clock."""

from __future__ import annotations

import base64
import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from sparkdl.errors import ParamError
from sparkdl.monitor import Monitor
from sparkdl.monitor.trace import TraceFile
from tests.monitor.monitored_trainings import (
    FailsAtStep,
    sum_in_own_profile,
    sum_in_steps,
    train_and_fail,
    train_with_samples,
)
from tests.run_ranks import run_ranks
from tests.runner.local_runner import make_runner
from tests.training.scenes.training_scenes import make_spec, write_dataset

NUM_ROWS = 45  # three steps an epoch


def traced(tmp_path: Path, settings: Monitor, name: str = "trace.json") -> tuple[dict[str, Any], list[Any]]:
    spec, dataset = make_spec(epochs=3), write_dataset(tmp_path / "rows", NUM_ROWS)
    of_ranks = run_ranks(2, train_with_samples, spec, dataset, settings)
    file = TraceFile(str(tmp_path / name))
    for _, events in of_ranks:
        for event in events:
            if event["kind"] == "trace":
                file.take(event)
    file.close()
    content = (tmp_path / name).read_bytes()
    return json.loads(gzip.decompress(content) if name.endswith(".gz") else content), of_ranks


def test_a_trace_has_the_chosen_steps_of_all_ranks_with_their_operators_and_collectives(
    tmp_path: Path,
) -> None:
    content, of_ranks = traced(tmp_path, Monitor(seconds=600, trace="on the driver", trace_steps=(3, 5)))
    events = content["traceEvents"]
    assert content["otherData"]["missing"] == {}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {rank: name.split(" on ")[0] for rank, name in names.items()} == {0: "rank 0", 1: "rank 1"}
    slices: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"]].append(event)
    for rank in (0, 1):
        steps = {event["name"]: event for event in slices[rank] if event["name"].startswith("step ")}
        assert list(steps) == ["step 3", "step 4", "step 5"]
        for step in steps.values():
            inside = {
                event["name"]
                for event in slices[rank]
                if step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"]
            }
            assert "aten::addmm" in inside
            assert any(name.startswith("allreduce") for name in inside)
        assert not any(
            event["name"] == "aten::addmm" and event["ts"] < steps["step 3"]["ts"] for event in slices[rank]
        )
    # Without the monitor's thread and with it, the weights are the same.
    assert all(set(weights) for weights, _ in of_ranks)


def test_collectives_of_different_ranks_overlap_as_their_clocks_are_aligned(tmp_path: Path) -> None:
    content, _ = traced(tmp_path, Monitor(seconds=600, trace="on the driver", trace_steps=(2, 9)))
    begun: defaultdict[tuple[str, int], dict[int, dict[str, Any]]] = defaultdict(dict)
    for event in content["traceEvents"]:
        if event["ph"] == "X" and event.get("cat") == "ALLREDUCE":
            begun[event["name"], event["args"]["number"]][event["pid"]] = event
    pairs = [pair for pair in begun.values() if len(pair) == 2]
    assert len(pairs) >= 8
    for pair in pairs:
        first, second = pair[0], pair[1]
        # Nobody leaves a sum before everybody has come.
        assert first["ts"] <= second["ts"] + second["dur"]
        assert second["ts"] <= first["ts"] + first["dur"]


def test_arrows_of_different_ranks_have_different_numbers(tmp_path: Path) -> None:
    content, _ = traced(
        tmp_path, Monitor(seconds=600, trace="on the driver", trace_steps=(2, 3)), "trace.json.gz"
    )
    ranks_of: defaultdict[int, set[int]] = defaultdict(set)
    for event in content["traceEvents"]:
        if event["ph"] in ("s", "f"):
            ranks_of[event["id"]].add(event["pid"])
    assert ranks_of
    assert all(type(number) is int for number in ranks_of)  # Perfetto drops arrows with other ids
    assert all(len(ranks) == 1 for ranks in ranks_of.values())


def test_a_training_that_ends_before_the_last_step_has_a_trace_until_its_end(tmp_path: Path) -> None:
    content, _ = traced(tmp_path, Monitor(seconds=600, trace="on the driver", trace_steps=(8, 1000)))
    steps = {event["name"] for event in content["traceEvents"] if event["name"].startswith("step ")}
    assert steps == {"step 8", "step 9"}


def test_a_training_that_fails_during_the_trace_fails_with_its_own_error(tmp_path: Path) -> None:
    spec, dataset = make_spec(callbacks=(FailsAtStep(),)), write_dataset(tmp_path / "rows", NUM_ROWS)
    settings = Monitor(seconds=600, trace="on the driver", trace_steps=(1, 100))
    first, second = run_ranks(2, train_and_fail, spec, dataset, settings)
    assert (
        "FailsAtStep failed in on_step_end, epoch 1, step 2 on rank 1: ValueError: a step has failed"
        in second
    )
    assert "a step has failed" in first


def test_a_trace_that_never_came_leaves_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = TraceFile(str(tmp_path / "trace.json"))
    file.take(part(0, b"half", is_last=False))
    file.close()
    assert list(tmp_path.iterdir()) == []
    assert "There is no trace of this run in" in caplog.text


def part(number: int, content: bytes, *, is_last: bool) -> dict[str, Any]:
    return {"number": number, "part": base64.b64encode(content).decode(), "is_last": is_last}


def test_a_trace_that_never_came_leaves_that_of_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("earlier")
    TraceFile(str(tmp_path / "trace.json")).close()
    assert (tmp_path / "trace.json").read_text() == "earlier"


def test_a_trace_of_a_second_attempt_has_no_part_of_the_first(tmp_path: Path) -> None:
    packed = gzip.compress(b"second")
    file = TraceFile(str(tmp_path / "trace.json"))
    file.take(part(0, b"first", is_last=False))
    file.take(part(0, packed[:5], is_last=False))
    file.take(part(1, packed[5:], is_last=True))
    file.close()
    assert (tmp_path / "trace.json").read_text() == "second"


@pytest.mark.parametrize("name", ["nowhere/trace.json", ""])
def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ParamError, match="trace of the Monitor is .*cannot be written"):
        TraceFile(str(tmp_path / name))


def test_a_trace_of_a_runner_has_the_first_step(tmp_path: Path) -> None:
    monitor = Monitor(seconds=600, trace=str(tmp_path / "trace.json"), trace_steps=(1, 2))
    make_runner(monitor=monitor).run(sum_in_steps, 4)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = {(event["pid"], event["name"]) for event in events if event["name"].startswith("step ")}
    assert steps == {(rank, f"step {step}") for rank in (0, 1) for step in (1, 2)}


def test_a_rank_with_a_profiler_of_its_own_is_traced_without_its_operators(tmp_path: Path) -> None:
    monitor = Monitor(seconds=600, trace=str(tmp_path / "trace.json"), trace_steps=(2, 3))
    make_runner(monitor=monitor).run(sum_in_own_profile, 4)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "ALLREDUCE" for event in events)
