"""What the planner measures: the parts of the model that it plans, and what explains their times."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparkdl.bench.contenders.layers import LayerTrial
from sparkdl.cli import main
from sparkdl.parallel import Parallelism
from sparkdl.planner import DecoderShape
from sparkdl.planner.measure import _shares
from sparkdl.planner.report import print_comparison
from sparkdl.planner.shape import RECIPES

SHAPE = DecoderShape(vocabulary=64, width=32, layers=2, heads=4, key_heads=2, hidden=48, sequence=16)


@pytest.mark.parametrize("is_gated", [True, False])
def test_measured_blocks_have_the_weights_of_the_shape(is_gated: bool) -> None:
    case = {
        **{name: getattr(SHAPE, name) for name in ("width", "heads", "key_heads", "hidden")},
        "part": "blocks",
        "blocks": 2,
        "rows": 1,
        "positions": 16,
        "autocast": False,
        "is_gated": is_gated,
    }
    threads = torch.get_num_threads()
    trial = LayerTrial(case)
    trial.run(1)
    torch.set_num_threads(threads)  # a trial takes one
    _, *weights = trial.tensors
    numbers = replace(SHAPE, is_gated=is_gated).on_rank(Parallelism(data=1), RECIPES["float32"])
    assert sum(weight.numel() for weight in weights) == 2 * numbers.block
    assert all(weight.grad is not None for weight in weights)


def test_two_kinds_of_work_are_told_apart_and_none_takes_less_than_nothing() -> None:
    assert _shares([(1.0, 2.0, 8.0), (3.0, 1.0, 9.0)]) == pytest.approx((2.0, 3.0))
    assert _shares([(1.0, 0.0, 2.0), (2.0, 0.0, 4.0)]) == pytest.approx((2.0, 0.0))
    assert _shares([(1.0, 1.0, 1.0), (2.0, 1.0, 3.0)])[1] == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--megabits", "100"], "--megabits has an effect only with --validate"),
        (["--validate", "--megabits", "fast"], "--megabits fast is not a list of numbers"),
        (["--validate", "--megabits", "0"], "--megabits 0 has a rate that is not above 0"),
        (["bert", "--validate"], "bert is unknown; it may be any of gpt, wide-gpt"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) != 0
    assert message in capsys.readouterr().err


def test_a_table_of_measured_steps_has_their_time_by_use(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "model": "wide-gpt",
        "layout": "data 2, pipeline 2, in 4",
        "hosts": 2,
        "ranks": 4,
        "megabits": 1000.0,
        "measured_s": 2.0,
        "predicted_s": 1.8,
        "ratio": 0.9,
        "processor_s": 1.5,
        "kernel_s": 0.25,
        "waits_s": 0.375,
        "measured_bytes": 512 << 20,
        "memory_bytes": {"weights": 500 << 20},
        "memory_ratio": 500 / 512,
    }
    print_comparison([row], details=True)
    shown = capsys.readouterr().out
    assert "time: 1 of 1 within 15%" in shown
    step, parts = (line.split() for line in shown.splitlines() if line.strip().startswith("wide-gpt"))
    assert step[-4:] == ["0.90", "512", "500", "0.98"]
    assert parts[-7:] == ["s", "1.5", "s", "250", "ms", "375", "ms"]
