"""``sparkdl bench parallel`` end to end, on a model so small that it takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkdl.bench import parallel
from sparkdl.bench.contenders import parallel as contenders
from tests.bench.parsed import parsed

SMALL_MODEL = """
import runpy
from sparkdl.bench.contenders import parallel
parallel.MODELS["23M"] = parallel.DecoderSize(width=32, num_layers=4, num_heads=4, vocabulary=64)
runpy.run_module("sparkdl.bench.contenders.rank", run_name="__main__")
"""


@pytest.mark.slow  # four ranks that import torch
def test_run_measures_every_contender_and_its_state_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sparkdl.bench.rank_group.RANK_ARGUMENTS", ("-c", SMALL_MODEL))
    path = tmp_path / "report.json"
    arguments = parsed(parallel, "--batches", "4x16,1x8", "--seconds", "0.01", "--json", str(path))
    assert parallel.run(arguments) == 0
    rows = json.loads(path.read_text())["rows"]
    of_four = {row["contender"]: row for row in rows if row["case"] == "23M, 4 x 16"}
    assert set(of_four) == set(parallel.CONTENDERS)
    assert all(0 < row["median_s"] <= row["p90_s"] for row in rows)
    for name in ("FSDP2 on sparkdl", "TP on sparkdl", "PP on sparkdl", "CP on gloo"):
        share = of_four[name]["state_bytes"] / of_four["one rank"]["state_bytes"]
        assert share == pytest.approx(0.5, abs=0.1), name
    assert not any(row["contender"].startswith("PP") for row in rows if row["case"] == "23M, 1 x 8")
    assert "of one rank" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "millions"), [("23M", 23), ("100M", 98)])
def test_models_have_the_parameters_that_their_names_say(name: str, millions: int) -> None:
    import torch

    with torch.device("meta"):
        model = contenders.make_decoder(contenders.MODELS[name])
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(
        millions, rel=0.05
    )
