from __future__ import annotations

import itertools
import random

import pytest
from torch import nn

from sparkdl.errors import ParamError
from sparkdl.networks.decoder import Decoder, DecoderSizes
from sparkdl.parallel.pipeline.cut import check_trainable
from sparkdl.parallel.pipeline.parts import PipelineParts, balance, costs_by_memory, parts_of
from sparkdl.parallel.pipeline.schedules import stages_of_rank


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


def test_embedding_and_head_count_for_their_stages() -> None:
    module = Decoder(DecoderSizes(vocabulary=64, width=16, layers=3, heads=2, is_tied=False))
    costs = costs_by_memory(module)
    assert costs[0] == costs[1] + 64 * 16
    assert costs[2] == costs[1] + 64 * 16 + 16


def test_a_rank_without_anything_to_train_is_refused() -> None:
    check_trainable(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), "1f1b", 2)
    with pytest.raises(ParamError, match="Rank 1 of the pipeline would have the blocks 1 to 1"):
        check_trainable(nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)), "1f1b", 2)


def test_stages_of_a_v_schedule_begin_and_end_on_the_first_rank() -> None:
    assert stages_of_rank("1f1b", 1, 4) == [1]
    assert stages_of_rank("interleaved-1f1b", 1, 4) == [1, 5]
    assert stages_of_rank("zbv", 0, 4) == [0, 7]
    with pytest.raises(ParamError, match="zbv"):
        stages_of_rank("zebra", 0, 4)


def test_parts_of_a_pipeline_come_from_the_model() -> None:
    assert parts_of(nn.Sequential(nn.Linear(2, 2))) == PipelineParts((), "", ())
    with pytest.raises(ParamError, match="pipeline_parts"):
        parts_of(nn.Linear(2, 2))
