"""Sums of float32 can travel between hosts in 16 bits; the additions are in float32."""

from __future__ import annotations

import math

import pytest

from tests.collective.scenes import wire_scenes
from tests.run_ranks import run_ranks


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_reduction_rounds_the_values_sent_and_adds_in_float32(world_size: int) -> None:
    run_ranks(world_size, wire_scenes.reductions)


def test_other_operations_and_dtypes_are_exact() -> None:
    run_ranks(2, wire_scenes.what_is_not_rounded)


@pytest.mark.parametrize(
    "host_of_rank", [(0, 0, 1, 1), (0, 1, 0), pytest.param((0, 1, 2), marks=pytest.mark.slow)]
)
def test_every_rank_gets_the_same_bits(host_of_rank: tuple[int, ...]) -> None:
    first, *others = run_ranks(len(host_of_rank), wire_scenes.over_hosts, host_of_rank)
    for other in others:
        assert other == first


def test_bfloat16_keeps_the_range_of_float32_and_float16_does_not() -> None:
    for wires in run_ranks(2, wire_scenes.extremes):
        for seen in wires.values():
            assert math.isnan(seen["nan"])
            assert seen["inf"] == math.inf
        assert wires["bfloat16"]["large"] == 70_144.0
        assert wires["bfloat16"]["subnormal"] > 0
        assert wires["float16"]["large"] == math.inf
        assert wires["float16"]["subnormal"] == 0


def test_error_on_every_rank_names_the_wire_of_each_rank() -> None:
    wires = ("float32", "bfloat16", "float32")
    for outcome in run_ranks(3, wire_scenes.error_of_opening, "tcp", *wires):
        assert outcome["kinds"][0] == "MismatchError"
        for rank, wire in enumerate(wires):
            assert f"rank {rank} said {wire!r}" in outcome["message"]


@pytest.mark.parametrize(
    ("transport", "wire", "named"), [("tcp", "float8", "bfloat16"), ("mpi", "bfloat16", "transport='mpi'")]
)
def test_unknown_wire_and_a_wire_over_mpi_are_refused(transport: str, wire: str, named: str) -> None:
    (outcome,) = run_ranks(1, wire_scenes.error_of_opening, transport, wire)
    assert outcome["kinds"][0] == "ParamError"
    assert named in outcome["message"]
