from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor, nn

from sparkdl.errors import ParamError
from sparkdl.networks.decoder import Decoder, DecoderSizes
from sparkdl.parallel.parallelism import SCHEDULES, Parallelism
from sparkdl.parallel.pipeline.cut import check_trainable
from sparkdl.parallel.pipeline.parts import PipelineParts, balance, costs_by_memory, parts_of
from sparkdl.parallel.pipeline.schedules import num_microbatches, stages_of_rank


def costliest(costs: list[float], firsts: list[int]) -> float:
    return max(sum(costs[first:end]) for first, end in itertools.pairwise(firsts))


def test_no_other_cut_has_a_cheaper_costliest_stage() -> None:
    draw = random.Random(3)
    for _ in range(30):
        costs = [draw.random() for _ in range(draw.randrange(3, 9))]
        stages = draw.randrange(1, len(costs) + 1)
        firsts = balance(costs, stages)
        assert (firsts[0], firsts[-1], len(firsts)) == (0, len(costs), stages + 1)
        others = itertools.combinations(range(1, len(costs)), stages - 1)
        best = min(costliest(costs, [0, *cuts, len(costs)]) for cuts in others)
        assert costliest(costs, firsts) == pytest.approx(best)
        assert all(first < end for first, end in itertools.pairwise(firsts))


def test_thousands_of_blocks_are_cut_evenly() -> None:
    costs = [3.0, *([1.0] * 2998), 5.0]
    for stages in (2, 7, 600, 1000, 2999, 3000):
        firsts = balance(costs, stages)
        assert len(set(firsts)) == stages + 1
        assert costliest(costs, firsts) == max(5, math.ceil(sum(costs) / stages))


def test_embedding_and_head_count_for_their_stages() -> None:
    module = Decoder(DecoderSizes(vocabulary=64, width=16, layers=3, heads=2, is_tied=False))
    costs = costs_by_memory(module)
    assert costs[0] == costs[1] + 64 * 16
    assert costs[2] == costs[1] + 64 * 16 + 16


def test_a_rank_without_anything_to_train_is_refused() -> None:
    check_trainable(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), "1f1b", 2)
    with pytest.raises(ParamError, match="Rank 1 .* 1 to 1"):
        check_trainable(nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)), "1f1b", 2)


def test_a_frozen_stage_is_refused_by_schedules_that_split_the_backward_pass() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[0].requires_grad_(False)
    check_trainable(model, "interleaved-1f1b", 2)
    for schedule in ("zero-bubble", "zbv", "dualpipe-v"):
        with pytest.raises(ParamError, match="No parameter of pipeline stage 0 is trained"):
            check_trainable(model, schedule, 2)


def test_options_of_parallelism_are_checked_by_type_and_name() -> None:
    assert all(Parallelism(schedule=name).schedule == name for name in SCHEDULES)
    for wrong in ({"recompute": "off"}, {"schedule": "zb-h1"}, {"stage_blocks": 3}, {"offload": 1}):
        with pytest.raises(ParamError, match=f"{next(iter(wrong))} must be "):
            Parallelism(**wrong)  # type: ignore[arg-type]  # as a job's YAML may give them


def test_stages_of_a_v_schedule_begin_and_end_on_the_first_rank() -> None:
    assert stages_of_rank("1f1b", 1, 4) == [1]
    assert stages_of_rank("interleaved-1f1b", 1, 4) == [1, 5]
    assert stages_of_rank("zbv", 0, 4) == [0, 7]
    with pytest.raises(ParamError, match="zbv"):
        stages_of_rank("zebra", 0, 4)


class Shifted(nn.Module):
    """A model with a parameter outside of its parts, which changes nothing before it is trained."""

    pipeline_parts = (("embedding",), "blocks", ("head",))

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(2, 4), nn.Linear(4, 2)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.embedding(rows) + self.shift
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def test_a_parameter_outside_of_the_parts_is_refused() -> None:
    with pytest.raises(ParamError, match="'shift' of Shifted is in none of its pipeline parts"):
        check_trainable(Shifted(), "1f1b", 2)


@pytest.mark.parametrize(
    ("schedule", "ranks", "rows", "number"),
    [
        ("1f1b", 2, 15, 5),
        ("gpipe", 2, 7, 7),
        ("interleaved-1f1b", 2, 15, 3),  # 5 would be two rounds, of two and three
        ("interleaved-1f1b", 2, 16, 8),
        ("zero-bubble", 3, 10, 5),
        ("dualpipe-v", 2, 15, 5),
    ],
)
def test_batches_are_cut_into_as_many_microbatches_as_the_schedule_can_run(
    schedule: str, ranks: int, rows: int, number: int
) -> None:
    sizes = Parallelism(pipeline=ranks, schedule=schedule).resolve(ranks)
    assert num_microbatches(sizes, rows) == number


def test_a_number_of_microbatches_that_rounds_cannot_share_is_refused() -> None:
    sizes = Parallelism(pipeline=2, schedule="interleaved-1f1b", microbatches=5).resolve(2)
    with pytest.raises(ParamError, match="5 .* multiple of 2"):
        num_microbatches(sizes, 15)


def test_parts_of_a_pipeline_come_from_the_model() -> None:
    assert parts_of(nn.Sequential(nn.Linear(2, 2))) == PipelineParts((), "", ())
    with pytest.raises(ParamError, match="pipeline_parts"):
        parts_of(nn.Linear(2, 2))
