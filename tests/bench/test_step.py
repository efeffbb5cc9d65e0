"""``sparkdl bench step`` end to end, on a model so small that it takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkdl.bench import step
from sparkdl.bench.contenders import step as step_trials
from tests.bench.parsed import parsed

SMALL_MODEL = """
import runpy
from sparkdl.bench.contenders import step
step.MODELS["25M"] = step.EncoderSize(width=16, num_layers=2, num_heads=2)
runpy.run_module("sparkdl.bench.contenders.rank", run_name="__main__")
"""


@pytest.mark.slow  # fourteen ranks that import torch
def test_run_measures_every_contender_and_finds_the_ranks_alike(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sparkdl.bench.rank_group.RANK_ARGUMENTS", ("-c", SMALL_MODEL))
    path = tmp_path / "report.json"
    assert step.run(parsed(step, "--models", "25M", "--seconds", "0.01", "--json", str(path))) == 0
    report = json.loads(path.read_text())
    rows = {row["contender"]: row for row in report["rows"]}
    assert set(rows) | set(report["missing"]) == set(step.CONTENDERS)
    assert set(report["missing"]) <= {"hvd of Horovod"}
    assert all(0 < row["median_s"] <= row["p90_s"] and row["repetitions"] >= 9 for row in rows.values())
    assert rows["alone"]["communication_share"] == 0.0
    assert all(0.0 <= row["communication_share"] < 1.0 for row in rows.values())
    assert "communication" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "millions"), [("25M", 25), ("100M", 100)])
def test_models_have_the_parameters_that_their_names_say(name: str, millions: int) -> None:
    import torch

    with torch.device("meta"):
        model = step_trials.make_model(step_trials.MODELS[name])
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(
        millions, rel=0.02
    )
