"""Plans: every layout fits and works, the fastest comes first, and what fits nowhere is refused with what would do."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from sparkdl.errors import ParamError
from sparkdl.networks.decoder import Decoder, DecoderSizes
from sparkdl.parallel import Parallelism, on_meta
from sparkdl.parallel.parallelize import check_parts
from sparkdl.planner import MODELS, DecoderShape, Plan, count, make_cluster, plan
from sparkdl.planner.cluster import GIB, USABLE, known_gpu
from sparkdl.planner.layouts import MOST_HOSTS, advice, smallest_number
from sparkdl.planner.memory import memory_of
from sparkdl.planner.published import compare, compare_orders, orders
from sparkdl.planner.shape import RECIPES

HOST = make_cluster("h100")
SIZES = DecoderSizes(vocabulary=4096, width=1024, layers=12, heads=16, key_heads=4)


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan("llama-8b", make_cluster("h100", hosts=2), batch=64)


def test_layouts_fit_and_the_fastest_comes_first(found: Plan) -> None:
    assert len(found.layouts) > 20
    for layout in found.layouts:
        sizes = layout.parallelism
        assert sizes.resolve(16) == sizes
        assert layout.memory.total <= USABLE * 79.1 * GIB
        assert layout.rows * layout.passes * sizes.data * sizes.shard == 64
        assert 0 < layout.utilization < 1
    fastest = min(layout.time.total for layout in found.layouts)
    assert found.best.time.total <= 1.05 * fastest, "simpler layouts may be preferred"


def test_code_to_paste_is_the_layout(found: Plan) -> None:
    for layout in found.layouts:
        assert eval(layout.as_code(), {"Parallelism": Parallelism}).resolve(16) == layout.parallelism


def test_largest_batch_fits_and_one_row_more_does_not(found: Plan) -> None:
    for layout in found.layouts:
        sizes = layout.parallelism
        rows = layout.largest_batch // (layout.passes * sizes.data * sizes.shard)
        fits = [
            memory_of(
                MODELS["llama-8b"],
                sizes,
                rows=number,
                microbatches=layout.passes,
                recipe=RECIPES["bfloat16"],
            ).total
            <= USABLE * 79.1 * GIB
            for number in (rows, rows + 1)
        ]
        assert fits == [True, False]


def test_every_layout_can_be_prepared() -> None:
    with on_meta():
        module = Decoder(SIZES)
    layouts = plan(module, HOST, batch=32, sequence=4096).layouts
    assert {
        name
        for layout in layouts
        for name in ("tensor", "context", "pipeline")
        if getattr(layout.parallelism, name) > 1
    } == {
        "tensor",
        "context",
        "pipeline",
    }
    for layout in layouts:
        check_parts(module, layout.parallelism, layout.batch_size)


def test_a_model_that_fits_nowhere_is_refused_with_the_smallest_cluster() -> None:
    small = make_cluster("l4", hosts=1, between=100.0)
    with pytest.raises(
        ParamError, match=r"llama-70b with 70.6 billion parameters fits on 1 x 8 l4"
    ) as refusal:
        plan("llama-70b", small, batch=64)
    match = re.search(r"on which it fits has (\d+)", str(refusal.value))
    assert match is not None
    hosts = int(match[1])
    assert plan("llama-70b", replace(small, hosts=hosts), batch=64).layouts
    with pytest.raises(ParamError):
        plan("llama-70b", replace(small, hosts=hosts // 2), batch=64)


@pytest.mark.parametrize(
    ("least", "smallest"), [(1, (276, False)), (48, (276, False)), (63, (276, False)), (275, (280, False))]
)
def test_the_smallest_cluster_does_not_depend_on_where_the_search_begins(
    least: int, smallest: tuple[int, bool]
) -> None:
    assert smallest_number(least, lambda hosts: hosts >= 276 and hosts % 4 == 0) == smallest


def test_the_search_for_a_smallest_cluster_ends() -> None:
    assert smallest_number(1, lambda hosts: hosts >= 3) == (3, True)
    assert smallest_number(3, lambda hosts: hosts >= 4000) == (4000, False)
    assert smallest_number(3, lambda hosts: hosts == MOST_HOSTS) == (MOST_HOSTS, False)
    assert smallest_number(3, lambda _: False) is None


@pytest.mark.timeout(60)  # it takes about three seconds
def test_a_model_of_thousands_of_layers_is_refused_soon() -> None:
    deep = DecoderShape(name="deep", vocabulary=32000, width=4096, layers=2000, heads=32, sequence=2048)
    with pytest.raises(ParamError, match=r"The smallest cluster .* has about \d+, with Parallelism"):
        plan(deep, make_cluster("h100", memory_gib=16.0), batch=512)


def test_a_batch_that_no_ranks_can_share_is_refused() -> None:
    counted = count(nn.Linear(8, 8), torch.zeros(1, 8))
    with pytest.raises(ParamError, match="Choose a batch that is a multiple of 8"):
        plan(counted, HOST, batch=7)
    assert plan(counted, HOST, batch=8).best.as_code() == "Parallelism(data=8)"
    for arguments in ({"batch": 0}, {"batch": 8, "precision": "float16"}):
        with pytest.raises(ParamError, match="must be"):
            plan("llama-1b", HOST, **arguments)


def test_small_models_are_replicated_and_large_ones_divided() -> None:
    with on_meta():
        module = Decoder(SIZES)
    assert plan(module, HOST, batch=512, sequence=1024).best.as_code() == "Parallelism(data=8)"
    large = plan("llama-70b", make_cluster("h100", hosts=16), batch=256, precision="bfloat16-shards").best
    assert large.parallelism.num_ranks_of_replica > 8


def test_slow_links_between_hosts_are_avoided() -> None:
    """Where they are slow, weights are not gathered across hosts."""
    slow = make_cluster("h100", hosts=4, between=25.0)
    best = plan("llama-8b", slow, batch=128, sequence=2048).best.parallelism
    assert best.shard * best.context * best.tensor <= 8


def test_layout_of_a_longer_sequence_divides_it() -> None:
    best = plan("llama-8b", make_cluster("h100", hosts=2), batch=8, sequence=131072).best.parallelism
    assert best.context > 1


def test_every_layout_has_a_sentence(found: Plan) -> None:
    for layout in found.layouts:
        assert re.fullmatch(r"[A-Z].*; .* the largest part of the \d+% of memory\.", layout.reason)


def test_published_runs_are_predicted_within_twenty_percent() -> None:
    rows = compare()
    assert len(rows) == 27
    assert {row["run"]: round(row["error"], 2) for row in rows if abs(row["error"]) > 0.2} == {}


def test_of_two_published_ways_to_train_a_model_the_faster_one_is_known() -> None:
    predicted = {row["run"]: row["predicted"] for row in compare()}
    for faster, slower in (
        ("Llama 2 13B, A100", "Llama 2 13B, A100, selective"),
        ("Llama 3.1 8B, 8 H100, selective", "Llama 3.1 8B, 8 H100, eager, selective"),
        ("Llama 3.1 8B, 128 H100, selective", "Llama 3.1 8B, 64 H100, tensor 8, selective"),
    ):
        assert predicted[faster] > predicted[slower]


def test_of_the_published_layouts_of_a_job_the_planner_has_the_fastest_first() -> None:
    for order in orders():
        speeds = [run.predict() for run in order.runs]
        assert speeds[0] == max(speeds), order.job
        if order.is_sorted:
            assert speeds == sorted(speeds, reverse=True), order.job
    interleaved, plain = (row["predicted"] for row in compare_orders()[:2])
    assert plain / interleaved == pytest.approx(100 / 128, rel=0.05)


def test_memory_of_a_device_can_be_given() -> None:
    assert make_cluster("h100", memory_gib=40.0).device == replace(HOST.device, memory_bytes=40 * GIB)


def test_mpi_is_advised_for_cpus_alone() -> None:
    many = make_cluster("h100", hosts=16)
    assert 'transport="mpi"' not in " ".join(advice(many))
    assert 'transport="hierarchical-mpi"' in " ".join(advice(many))
    assert 'transport="mpi"' in " ".join(advice(replace(many, device=replace(many.device, is_cpu=True))))


def test_gpus_without_bfloat16_are_told() -> None:
    for name, is_told in (("t4", True), ("v100", True), ("a100", False)):
        assert ("no units for bfloat16" in " ".join(advice(make_cluster(name)))) is is_told


def test_rounded_wires_are_advised_with_a_transport_that_has_them() -> None:
    slow = make_cluster("h100", hosts=4, between=10.0)
    assert 'transport="hierarchical" with wire="bfloat16"' in " ".join(advice(slow))
    of_cpus = " ".join(advice(replace(slow, device=replace(slow.device, is_cpu=True))))
    assert "this slow, wire=" in of_cpus


def test_a_gpu_is_known_by_its_data_sheet() -> None:
    for name, gib, known in (
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
    ):
        device = known_gpu(name, gib * GIB)
        assert device is not None
        assert device.name == known
