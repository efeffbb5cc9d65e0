from __future__ import annotations

from typing import Any

import pytest

from sparkdl.errors import ParamError
from sparkdl.parallel.parallelism import Parallelism, place_ranks


def sizes(parallelism: Parallelism) -> tuple[Any, ...]:
    return tuple(getattr(parallelism, name) for name in ("pipeline", "data", "shard", "context", "tensor"))


@pytest.mark.parametrize(
    ("given", "ranks", "found"),
    [
        ({}, 4, (1, 4, 1, 1, 1)),
        ({"shard": -1}, 4, (1, 1, 4, 1, 1)),
        ({"shard": -1, "data": 2}, 8, (1, 2, 4, 1, 1)),
        ({"tensor": 2, "pipeline": 2}, 8, (2, 2, 1, 1, 2)),
        ({"data": -1, "context": 3}, 6, (1, 2, 1, 3, 1)),
        ({"data": 2, "tensor": 2}, 4, (1, 2, 1, 1, 2)),
    ],
)
def test_unset_sizes_are_derived_from_the_number_of_ranks(
    given: dict[str, int], ranks: int, found: tuple[int, ...]
) -> None:
    assert sizes(Parallelism(**given).resolve(ranks)) == found


@pytest.mark.parametrize(
    ("given", "ranks", "fits"),
    [
        ({"tensor": 3}, 8, ("tensor 3", "divides 8", "6 or 9")),
        ({"data": 2, "shard": 2}, 8, ("= 4", "by 2")),
        ({"data": 4, "shard": 4}, 8, ("= 16", "such as 8")),
    ],
)
def test_sizes_whose_product_is_not_the_number_of_ranks_are_refused_with_fitting_ones(
    given: dict[str, int], ranks: int, fits: tuple[str, ...]
) -> None:
    with pytest.raises(ParamError) as refused:
        Parallelism(**given).resolve(ranks)
    assert all(part in str(refused.value) for part in fits), refused.value


@pytest.mark.parametrize(
    "given",
    [{"tensor": 0}, {"shard": True}, {"data": -1, "shard": -1}, {"context": 1.5}, {"verify": "first"}],
)
def test_invalid_sizes_are_refused_at_once(given: dict[str, Any]) -> None:
    with pytest.raises(ParamError):
        Parallelism(**given)


def test_offload_without_shards_is_refused() -> None:
    assert Parallelism(shard=-1, offload=True).resolve(2).offload
    with pytest.raises(ParamError, match="offload keeps the shards"):
        Parallelism(tensor=2, offload=True).resolve(4)


def test_tensor_context_and_shard_groups_are_inside_a_host_and_the_others_across_hosts() -> None:
    hosts = [0, 1] * 8  # ranks alternate between the hosts
    parallelism = Parallelism(pipeline=1, data=2, shard=2, context=2, tensor=2)
    ranks = place_ranks(parallelism, hosts)
    for replica in ranks[0]:
        assert len({hosts[rank] for rank in replica.flatten().tolist()}) == 1
    for pair in ranks[0].flatten(1).T.tolist():
        assert {hosts[rank] for rank in pair} == {0, 1}
    assert sorted(ranks.flatten().tolist()) == list(range(16))
