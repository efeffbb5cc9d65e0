"""``sparkdl bench link`` end to end, on a model so small that it takes seconds, and its options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkdl.bench import link
from sparkdl.bench.contenders import link as link_trials
from sparkdl.bench.contenders.parallel import make_decoder
from sparkdl.bench.namespaces import why_impossible
from sparkdl.errors import ParamError
from tests.bench.parsed import parsed

SMALL_MODEL = """
import runpy
from sparkdl.bench.contenders import link, parallel
link.MODELS["25M"] = parallel.DecoderSize(width=64, num_layers=2, num_heads=2, vocabulary=256)
runpy.run_module("sparkdl.bench.contenders.rank", run_name="__main__")
"""


# One with each way of the ranks; all contenders need ranks of a second wire format, too.
SOME = ("alone", "PowerSGD, rank 4", "DiLoCo, overlapped")


@pytest.mark.slow  # tests/slow_links has what the contenders compute
@pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "hosts can be made")
@pytest.mark.parametrize("contenders", [SOME, tuple(link.contenders_for(3))])
def test_run_measures_contenders_on_two_hosts_and_finds_the_ranks_alike(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    contenders: tuple[str, ...],
) -> None:
    monkeypatch.setattr("sparkdl.bench.rank_group.RANK_ARGUMENTS", ("-c", SMALL_MODEL))
    path = tmp_path / "report.json"
    options = ["--megabits", "50", "--every", "3", "--rounds", "1", "--json", str(path)]
    assert link.run(parsed(link, *options, "--contenders", "; ".join(contenders))) == 0
    rows = {row["contender"]: row for row in json.loads(path.read_text())["rows"]}
    assert tuple(rows) == contenders
    assert all(row["repetitions"] == 2 and row["median_s"] > 0 for row in rows.values())
    assert rows["alone"]["speed"] == 1.0
    assert contenders[-1] in capsys.readouterr().out


def test_model_has_the_parameters_that_its_name_says() -> None:
    import torch

    with torch.device("meta"):
        model = make_decoder(link_trials.MODELS["25M"])
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(25, rel=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--every", "0"), "--every 0 is too few"),
        (("--megabits", "fast"), "--megabits fast is not a list of numbers"),
        (("--megabits", "100,0"), "has a rate that is not above 0"),
        (("--contenders", "alone;DDP"), "--contenders DDP is unknown; it may be any of alone; averaged"),
    ],
)
def test_options_that_cannot_work_are_refused(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ParamError, match=message):
        link.run(parsed(link, *options))
