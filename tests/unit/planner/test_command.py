"""``sparkdl plan`` as users run it, without ranks."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from sparkdl.bench.namespaces import why_impossible
from sparkdl.cli import main
from sparkdl.planner.command import _measure_inside


def test_plan_prints_the_layouts_and_the_best_one_to_paste(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    arguments = [
        "plan",
        "llama-1b",
        "--batch",
        "64",
        "--device",
        "a100",
        "--json",
        str(report),
        "--plot",
        str(picture),
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    content = json.loads(report.read_text())
    best = content["layouts"][0]
    assert f"best: parallelism={best['code']}, batchSize={best['batch_size']}" in printed
    assert 'precision="bfloat16"' in printed
    assert max(map(len, printed.split("best:")[0].splitlines())) <= 100
    assert best["step_s"]["total"] > 0
    assert best["memory_bytes"]["total"] < 80 << 30
    assert picture.stat().st_size > 10_000


def test_without_rich_the_details_are_printed_and_a_table_is_refused_before_its_first_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    arguments = ["plan", "llama-1b", "--batch", "64"]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert "pip install rich, or install sparkdl with its extra 'plan'" in captured.err
    assert captured.out == ""
    assert main([*arguments, "--details"]) == 0
    assert "best: " in capsys.readouterr().out


def test_plan_prints_how_a_model_scales(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    arguments = ["plan", "llama-1b", "--batch", "64", "--hosts", "4,1,2", "--weak"]
    assert main([*arguments, "--json", str(report), "--plot", str(picture)]) == 0
    rows = json.loads(report.read_text())
    assert [row["ranks"] for row in rows] == [8, 16, 32]
    assert [row["batch"] for row in rows] == [64, 128, 256]
    assert "weak scaling on h100" in capsys.readouterr().out
    assert picture.stat().st_size > 10_000


def test_of_several_numbers_of_hosts_those_too_few_say_what_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "plan.json"
    arguments = ["plan", "llama-70b", "--batch", "64", "--device", "a100", "--hosts", "1,4,8"]
    assert main([*arguments, "--json", str(report)]) == 0
    rows = json.loads(report.read_text())
    assert [(row["hosts"], row["ranks"]) for row in rows] == [(1, 8), (4, 32), (8, 64)]
    assert ["refusal" in row for row in rows] == [True, False, False]
    printed = capsys.readouterr().out
    assert rows[0]["refusal"] in printed
    assert "strong scaling on a100" in printed
    assert re.search(
        r"fits on 1 x 8 a100, .* in none of \d+ layouts .* on which it fits has \d, with", printed
    )


@pytest.mark.parametrize("arguments", [["plan", "--validate"], ["bench", "scaling"]])
def test_no_permission_for_namespaces_is_said(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    why_impossible.cache_clear()
    try:
        assert main([*arguments, "--megabits", "300"]) == 2
    finally:
        why_impossible.cache_clear()
    said = (
        "--megabits needs network namespaces, and this machine does not allow them: making hosts of network"
    )
    assert said in capsys.readouterr().err


def test_no_link_is_measured_between_fewer_than_two_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert _measure_inside(8, 1) is None
    assert (
        "This machine has one GPU, and measuring the link between GPUs takes two" in capsys.readouterr().out
    )
    for ranks, num_gpus in ((1, 8), (1, None)):
        assert _measure_inside(ranks, num_gpus) is None
        assert capsys.readouterr().out == ""


def test_plan_prints_published_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--published"]) == 0
    printed = capsys.readouterr().out
    assert "462B, tensor 8, pipeline 16" in printed
    assert "torchtitan" in printed
    assert "interleaved-1f1b" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs a model and --batch"),
        (["llama-1b"], "needs a model and --batch"),
        (["llama-1b", "--batch", "8", "--hosts", "two"], "--hosts two is not a list of numbers of hosts"),
        (["llama-1b", "--batch", "8", "--device", "h900"], "There is no device 'h900'"),
        (["llama-1b", "--batch", "8", "--device", "cpu"], "add --measure"),
        (
            ["llama-1b", "--batch", "8", "--devices-per-host", "0"],
            "devices_per_host of a cluster must be a positive number, got 0",
        ),
        (["llama-1b", "--batch", "8", "--memory", "-1"], "above 0 GiB, got -1"),
        (["llama-1b", "--batch", "8", "--top", "0"], "--top 0 is too few"),
        (["llama-1b", "--batch", "8", "--json", "/nowhere/plan.json"], "there is no such folder"),
        (["llama-1b", "--batch", "8", "--sequence", "0"], "sequence must be a positive number"),
        (["llama-1b", "--batch", "8", "--device", "h100", "--measure"], "--device names h100. Leave one"),
        (
            ["llama-1b", "--batch", "8", "--device", "cpu", "--measure", "--devices-per-host", "1000"],
            "runs 1000 ranks at once",
        ),
        (["llama-1b", "--published"], "llama-1b is a model to plan. Leave one"),
        (["llama-1b", "--batch", "8", "--plot", "plan.foo"], "its name must end in .png"),
        (["llama-1b", "--batch", "9", "--weak", "--hosts", "2,3"], "which is not a whole number"),
        (["llama-405b", "--batch", "8"], "fits on 1 x 8 h100"),
        (["llama-405b", "--batch", "8", "--hosts", "1,2"], "fits on 1 x 8 h100"),
    ],
)
def test_what_cannot_work_is_said_with_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err
