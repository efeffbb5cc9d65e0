"""Sums of float32 can travel between hosts in 16 bits; the additions are in float32."""

from __future__ import annotations

import math

import pytest

from tests.collective.scenes import wire_scenes
from tests.run_ranks import run_ranks

wires = pytest.mark.parametrize("wire", ["bfloat16", "float16"])


@wires
@pytest.mark.parametrize("world_size", [2, 3])
def test_reduction_rounds_the_values_sent_and_adds_in_float32(world_size: int, wire: str) -> None:
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


def test_float16_wire_maps_large_values_to_infinity_and_tiny_ones_to_zero() -> None:
    for seen in run_ranks(2, wire_scenes.extremes, "float16"):
        assert math.isnan(seen["nan"])
        assert seen["inf"] == seen["large"] == math.inf
        assert seen["subnormal"] == 0


def test_error_on_every_rank_names_the_wire_of_each_rank() -> None:
    for message in run_ranks(3, wire_scenes.disagreement):
        assert message.startswith("MismatchError")
        assert "rank 0 said 'float32'; rank 1 said 'bfloat16'; rank 2 said 'float32'" in message


def test_unknown_wire_is_refused_with_the_known_ones() -> None:
    (message,) = run_ranks(1, wire_scenes.unknown, "tcp", "float8")
    assert message.startswith("ParamError")
    assert "bfloat16" in message


def test_mpi_transport_refuses_a_bfloat16_wire() -> None:
    (message,) = run_ranks(1, wire_scenes.unknown, "mpi", "bfloat16", variables={})
    assert message.startswith("ParamError")
    assert "transport='mpi'" in message
