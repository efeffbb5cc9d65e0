"""Sums of float32 can travel between hosts in 16 bits; they are added up in float32."""

from __future__ import annotations

import math

import pytest

from tests.collective import wire_scenes
from tests.run_ranks import run_ranks

wires = pytest.mark.parametrize("wire", ["bfloat16", "float16"])


@wires
@pytest.mark.parametrize("world_size", [2, 3])
def test_reduction_rounds_what_is_sent_and_adds_in_float32(world_size: int, wire: str) -> None:
    run_ranks(world_size, wire_scenes.reductions, wire)


@wires
def test_other_operations_and_dtypes_are_exact(wire: str) -> None:
    run_ranks(2, wire_scenes.what_is_not_rounded, wire)


@wires
@pytest.mark.parametrize("host_of_rank", [(0, 0, 1, 1), (0, 1, 0), (0, 1, 2)])
def test_every_rank_gets_the_same_bits(host_of_rank: tuple[int, ...], wire: str) -> None:
    results = run_ranks(len(host_of_rank), wire_scenes.over_hosts, wire, host_of_rank)
    assert set(results) == {results[0]}


def test_bfloat16_keeps_the_range_of_float32() -> None:
    for seen in run_ranks(2, wire_scenes.extremes, "bfloat16"):
        assert math.isnan(seen["nan"])
        assert seen["inf"] == math.inf
        assert seen["large"] == 70_144.0
        assert seen["subnormal"] > 0


def test_float16_ends_where_float16_does() -> None:
    for seen in run_ranks(2, wire_scenes.extremes, "float16"):
        assert math.isnan(seen["nan"])
        assert seen["inf"] == seen["large"] == math.inf
        assert seen["subnormal"] == 0


def test_ranks_that_disagree_are_named_on_all_of_them() -> None:
    for message in run_ranks(3, wire_scenes.disagreement):
        assert message.startswith("MismatchError")
        assert "rank 0 said 'float32'; rank 1 said 'bfloat16'; rank 2 said 'float32'" in message


def test_wire_that_does_not_exist_is_refused_with_those_that_do() -> None:
    (message,) = run_ranks(1, wire_scenes.unknown, "tcp", "float8")
    assert message.startswith("ParamError")
    assert "bfloat16" in message


def test_mpi_refuses_what_it_cannot_do() -> None:
    (message,) = run_ranks(1, wire_scenes.unknown, "mpi", "bfloat16", variables={})
    assert message.startswith("ParamError")
    assert "transport='mpi'" in message
