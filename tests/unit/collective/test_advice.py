from __future__ import annotations

import math

import numpy as np
import pytest

from sparkdl.collective import TRANSPORTS, advise
from sparkdl.errors import ParamError

TWO_BY_TWO = ["a", "a", "b", "b"]


def test_one_host_gets_shared_memory_and_no_process_sets() -> None:
    advice = advise(["a"] * 4, has_mpi=True)
    assert advice.transport == "auto"
    assert not advice.process_sets
    assert "share one host" in advice.reasons[0]


def test_process_sets_follow_hosts_and_run_across_them() -> None:
    assert advise(TWO_BY_TWO).process_sets == {
        "host 0": (0, 1),
        "host 1": (2, 3),
        "across 0": (0, 2),
        "across 1": (1, 3),
    }


def test_hosts_of_unequal_size_get_no_sets_across() -> None:
    assert advise(["a", "b", "b"]).process_sets == {"host 1": (1, 2)}


def test_mpi_is_advised_where_it_drives_the_fabric_faster() -> None:
    advice = advise(["a", "b"], fabric="infiniband", has_mpi=True)
    assert advice.transport == "mpi"
    assert advice.seconds["mpi"] < advice.seconds["native"]


def test_measured_tcp_can_turn_the_advice() -> None:
    assert advise(["a", "b"], fabric="infiniband", has_mpi=True, rates={"tcp": 25e9}).transport == "auto"


def test_measured_link_leaves_a_fabric_ahead_of_tcp() -> None:
    on_cpus = advise(["a", "b"], fabric="infiniband", has_mpi=True, rates={"link": 20e9})
    assert on_cpus.transport == "mpi"
    on_gpus = advise(TWO_BY_TWO, gpus_per_host=2, fabric="infiniband", rates={"link": 20e9})
    assert on_gpus.transport == "auto"
    assert on_gpus.seconds["auto"] < on_gpus.seconds["hierarchical"]


def test_each_rate_counts_for_what_it_was_measured_of() -> None:
    arguments = {"gpus_per_host": 2, "fabric": "infiniband", "num_bytes": 10**9}
    assumed = advise(TWO_BY_TWO, **arguments).seconds
    by_tcp = advise(TWO_BY_TWO, **arguments, rates={"tcp": 1e9}).seconds
    assert (by_tcp["auto"], by_tcp["hierarchical"]) == (assumed["auto"], pytest.approx(1.0))
    both = advise(TWO_BY_TWO, **arguments, rates={"tcp": 1e9, "link": 10e9}).seconds
    assert both["hierarchical"] == by_tcp["hierarchical"]
    assert both["auto"] == pytest.approx(1 / 9)


@pytest.mark.parametrize("fabric", ["infiniband", "efa"])
def test_nobody_is_told_that_nccl_has_no_more_than_tcp_where_there_is_a_fabric(fabric: str) -> None:
    advice = advise(TWO_BY_TWO, gpus_per_host=2, fabric=fabric, rates={"tcp": 100e9, "link": 1e9})
    assert advice.transport == "hierarchical"
    assert not any("no more than TCP" in reason for reason in advice.reasons)


def test_mpi_is_not_said_to_drive_ethernet() -> None:
    assert advise(["a", "b"], has_mpi=True).transport == "auto"


def test_elastic_ranks_never_get_mpi() -> None:
    advice = advise(["a", "b"], fabric="efa", has_mpi=True, elastic=True)
    assert advice.transport == "auto"
    assert "come and go" in advice.reasons[0]


@pytest.mark.parametrize(
    ("fabric", "has_mpi", "elastic", "transport", "reason"),
    [
        ("ethernet", False, False, "hierarchical", "TCP once per byte"),
        ("infiniband", True, False, "auto", "without the host"),
        ("efa", True, False, "hierarchical-mpi", "MPI, which drives efa"),
        ("efa", True, True, "hierarchical", "TCP once per byte"),
        ("efa", False, False, "hierarchical", "TCP once per byte"),
    ],
)
def test_hosts_with_gpus_get_nccl_inside_and_what_drives_the_fabric_across(
    fabric: str, has_mpi: bool, elastic: bool, transport: str, reason: str
) -> None:
    advice = advise(TWO_BY_TWO, gpus_per_host=2, fabric=fabric, has_mpi=has_mpi, elastic=elastic)
    assert advice.transport == transport
    assert advice.transport in TRANSPORTS
    assert set(advice.seconds) <= set(TRANSPORTS)
    assert reason in advice.reasons[0]
    assert any("aws-ofi-nccl" in text for text in advice.reasons) == (fabric == "efa")


def test_slow_links_are_weighed_against_copies_to_host_memory() -> None:
    slow = advise(TWO_BY_TWO, gpus_per_host=2, num_bytes=400, rates={"tcp": 100.0})
    assert slow.seconds["hierarchical"] == slow.seconds["auto"] == pytest.approx(2 * 1 / 2 * 400 / 100)
    fast = advise(TWO_BY_TWO, gpus_per_host=2, num_bytes=400, rates={"tcp": 1e12})
    assert fast.seconds["hierarchical"] > fast.seconds["auto"]


def test_one_host_of_gpus_needs_no_hierarchy() -> None:
    advice = advise(["a", "a"], gpus_per_host=2)
    assert advice.transport == "auto"
    assert any("NCCL" in reason for reason in advice.reasons)


def test_more_ranks_than_gpus_is_said() -> None:
    assert any(
        "2 ranks on a host share 1 GPUs" in reason for reason in advise(TWO_BY_TWO, gpus_per_host=1).reasons
    )


def test_a_ring_estimate_is_the_formula() -> None:
    advice = advise(["a", "b", "c"], num_bytes=300, rates={"tcp": 100.0})
    assert advice.seconds["native"] == pytest.approx(2 * 2 / 3 * 300 / 100)
    assert advice.transport in TRANSPORTS


def test_advice_can_be_read() -> None:
    text = str(advise(TWO_BY_TWO))
    assert text.startswith("transport='auto'\nprocess sets: host 0: [0, 1]")
    assert "sparkdl bench allreduce" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": []}, "hosts is empty"),
        ({"hosts": ["a"], "fabric": "token ring"}, "'token ring' is unknown"),
        ({"hosts": ["a"], "rates": {"disk": 1.0}}, "may have 'link', 'tcp' and 'memory'"),
        ({"rates": {"link": 0}}, r"rates\['link'\]=0 is no rate; give bytes per second, more than 0"),
        ({"rates": {"link": -1e9}}, r"rates\['link'\]=-1000000000.0 is no rate"),
        ({"rates": {"link": 1e9, "tcp": math.inf}}, r"rates\['tcp'\]=inf is no rate"),
        ({"rates": {"memory": math.nan}}, r"rates\['memory'\]=nan is no rate"),
        ({"rates": {"tcp": "1e9"}}, r"rates\['tcp'\]='1e9' is no rate"),
        ({"num_bytes": -5}, "num_bytes=-5 is no size; give the bytes of one step's gradients"),
        ({"num_bytes": 0}, "num_bytes=0 is no size"),
        ({"num_bytes": math.nan}, "num_bytes=nan is no size"),
        ({"gpus_per_host": -1}, "gpus_per_host=-1 is no count; give how many GPUs"),
        ({"gpus_per_host": 1.5}, "gpus_per_host=1.5 is no count"),
        ({"gpus_per_host": None}, "gpus_per_host=None is no count"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ParamError, match=message):
        advise(**{"hosts": TWO_BY_TWO, **arguments})  # type: ignore[arg-type]  # that is what is tested


def test_numbers_of_numpy_are_numbers() -> None:
    arguments = {"gpus_per_host": 2, "fabric": "infiniband", "num_bytes": 1000, "rates": {"link": 1e9}}
    own = {
        **arguments,
        "gpus_per_host": np.int64(2),
        "num_bytes": np.int64(1000),
        "rates": {"link": np.float32(1e9)},
    }
    assert advise(TWO_BY_TWO, **own).seconds == advise(TWO_BY_TWO, **arguments).seconds  # type: ignore[arg-type]
