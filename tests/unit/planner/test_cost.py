"""The time of collectives and steps: closed forms, and what must not make a step slower."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkdl.errors import ParamError
from sparkdl.parallel import Parallelism
from sparkdl.planner import DEVICES, Cluster, DecoderShape, Link, make_cluster
from sparkdl.planner.cluster import link_of_sums
from sparkdl.planner.cost import StepTime, step_time
from sparkdl.planner.shape import RECIPES
from sparkdl.planner.sums import SumTimes

NEAR = Link(name="near", latency_s=1e-6, bytes_per_s=100e9)
FAR = Link(name="far", latency_s=10e-6, bytes_per_s=10e9)
FREE = Link(name="free", latency_s=0.0, bytes_per_s=1e30, occupies=0.0)
CLUSTER = make_cluster("h100", hosts=4, devices_per_host=8, inside=NEAR, between=FAR)
SHAPE = DecoderShape(vocabulary=32000, width=2048, layers=16, heads=16, sequence=2048)
RECIPE = RECIPES["bfloat16"]
ONE = Parallelism(data=1)


def time(sizes: Parallelism, cluster: Cluster = CLUSTER, *, rows: int = 1, microbatches: int = 8) -> StepTime:
    return step_time(SHAPE, cluster, sizes, rows=rows, microbatches=microbatches, recipe=RECIPE)


def test_groups_lie_on_as_few_hosts_as_their_stride_allows() -> None:
    for stride, size, inside, hosts in (
        (1, 8, 8, 1),
        (1, 32, 8, 4),
        (4, 8, 2, 4),
        (8, 4, 1, 4),
        (2, 2, 2, 1),
    ):
        group = CLUSTER.group(stride, size)
        assert (group.inside, group.hosts) == (inside, hosts)


def test_ring_moves_all_but_a_share_of_the_bytes() -> None:
    inside, across = CLUSTER.group(1, 8), CLUSTER.group(8, 4)
    assert inside.gather_s(1e9) == pytest.approx(7e-6 + 1e9 * 7 / 8 / 100e9)
    assert across.gather_s(1e9) == pytest.approx(30e-6 + 1e9 * 3 / 4 / 10e9)
    assert inside.reduce_s(1e9) == pytest.approx(2 * inside.gather_s(1e9))
    # Each device has its share of the network. NCCL's ring sends all but one piece over it.
    on_cpus = replace(CLUSTER, device=replace(CLUSTER.device, is_cpu=True))
    for cluster, crossing in ((CLUSTER, 31 / 32), (on_cpus, 3 / 4)):
        both = cluster.group(1, 32)
        assert both.gather_s(1e9) == pytest.approx(7e-6 + 30e-6 + 1e9 / 8 * crossing / 10e9)


def test_a_link_that_sums_have_measured_gives_their_times_back() -> None:
    ring = CLUSTER.group(1, 8)
    times = SumTimes(num_bytes=(0, 1 << 28), seconds=(14 * 1e-6, ring.reduce_s(1 << 28)), cores=2.0)
    for is_cpu, occupies in ((True, 1.0), (False, Link.occupies)):
        link = link_of_sums(times, 8, name="near", is_cpu=is_cpu)
        assert link.latency_s == pytest.approx(NEAR.latency_s)
        assert link.bytes_per_s == pytest.approx(NEAR.bytes_per_s)
        assert link.occupies == occupies
    shared = link_of_sums(replace(times, cores=0.5), 8, name="near", is_cpu=True)
    assert shared.occupies == 0.5


def test_a_pause_during_the_small_sum_makes_no_link_infinitely_fast() -> None:
    times = SumTimes(num_bytes=(4096, 65536), seconds=(2.0, 1.0), cores=1.0)
    assert link_of_sums(times, 2, name="disturbed", is_cpu=True).bytes_per_s == 65536 / 0.5


def test_tree_is_faster_for_small_messages_on_many_hosts() -> None:
    group = replace(CLUSTER, hosts=64).group(8, 64)
    assert group.reduce_s(1000) == pytest.approx(2 * (6 * 10e-6 + 1000 / 10e9))
    assert group.reduce_s(1000) < 2 * group.gather_s(1000)
    assert group.reduce_s(1e9) == pytest.approx(2 * group.gather_s(1e9))


def test_a_single_rank_communicates_nothing() -> None:
    alone = CLUSTER.group(1, 1)
    assert alone.gather_s(1e9) == alone.reduce_s(1e9) == alone.exchange_s(1e9) == alone.send_s(1e9) == 0
    step = time(Parallelism(data=1))
    assert step.exposed == sum(step.hidden.values()) == step.bubble == step.contention == 0


def test_without_links_and_copies_replicas_take_as_long_as_one_rank() -> None:
    free = replace(
        CLUSTER, inside=FREE, between=FREE, device=replace(CLUSTER.device, bandwidth=FREE.bytes_per_s)
    )
    alone = time(Parallelism(data=1), free)
    for sizes in (Parallelism(data=32), Parallelism(data=4, shard=8)):
        assert time(sizes, free).products == alone.products
        assert time(sizes, free).exposed == pytest.approx(0.0, abs=1e-12)


def test_bubble_is_the_share_of_narayanan() -> None:
    """(p - 1) / m of the ideal time with 1F1B, and half of it with two stages on each rank."""
    free, narrow = replace(CLUSTER, inside=FREE, between=FREE), replace(SHAPE, vocabulary=8)
    for schedule, stages in (("1f1b", 1), ("interleaved-1f1b", 2)):
        sizes = Parallelism(data=1, pipeline=4, schedule=schedule)
        step = step_time(narrow, free, sizes, rows=1, microbatches=16, recipe=RECIPE)
        ideal = step.products + step.attention + step.passes
        assert step.bubble / ideal == pytest.approx(3 / 16 / stages, rel=0.02)


def test_faster_links_and_devices_make_no_step_slower() -> None:
    slow, fast = replace(CLUSTER, between=FAR), replace(CLUSTER, between=replace(FAR, bytes_per_s=40e9))
    for sizes in (
        Parallelism(data=32),
        Parallelism(data=1, shard=32),
        Parallelism(data=4, tensor=8, sequence=True),
        Parallelism(data=2, context=4, tensor=4),
        Parallelism(data=8, pipeline=4),
    ):
        assert time(sizes, fast).total <= time(sizes, slow).total
        assert time(sizes, replace(fast, device=DEVICES["a100"])).compute > time(sizes, fast).compute


def test_gradients_of_replicas_are_copied_to_where_they_are_reduced() -> None:
    free = replace(CLUSTER, inside=FREE, between=FREE)
    copied_s = 2 * 4 * SHAPE.parameters / free.device.bandwidth
    assert time(Parallelism(data=32), free).data == pytest.approx(copied_s)


def test_weights_and_gradients_of_shards_are_copied_from_and_to_the_buffers_of_collectives() -> None:
    """With links that take no time, copies are all that shards add. The copies into gathers alone are hidden."""
    free = replace(CLUSTER, inside=FREE, between=FREE)
    for recipe, cast in ((RECIPES["bfloat16"], 0), (RECIPES["bfloat16-shards"], 1)):
        sizes = Parallelism(shard=8).resolve(8)
        step = step_time(SHAPE, free, sizes, rows=4, microbatches=2, recipe=recipe)
        numbers = SHAPE.on_rank(sizes, recipe)
        ends = numbers.before + numbers.after + numbers.block
        weights, gradients = recipe.gathered_bytes, recipe.reduced_bytes
        of_all = SHAPE.parameters * (2 * 2 * weights + weights + gradients)
        into_first = 2 * ends / 8 * (2 * weights + cast * (recipe.weight_bytes + weights))
        assert step.shard == pytest.approx(2 * (of_all + into_first) / free.device.bandwidth)
        assert step.hidden["shard"] > 0


def test_a_copy_on_a_cpu_also_reads_what_it_writes_to() -> None:
    gpu = CLUSTER.device
    assert gpu.copy_s(3e9, 1e9) == pytest.approx(4e9 / gpu.bandwidth)
    assert replace(gpu, is_cpu=True).copy_s(3e9, 1e9) == pytest.approx(5e9 / gpu.bandwidth)


def test_ranks_that_take_turns_fill_each_others_waiting() -> None:
    pipeline = Parallelism(data=1, pipeline=4)
    shared = replace(CLUSTER, device=replace(CLUSTER.device, shared_by=2.0))
    assert time(pipeline).bubble > 0
    assert time(pipeline, shared).bubble == 0


def test_shards_wait_for_every_gather_on_cpus_and_gather_the_root_twice() -> None:
    sizes = Parallelism(shard=2).resolve(2)
    cluster = make_cluster("h100", hosts=2, devices_per_host=1, inside=NEAR, between=FAR)
    on_cpus = replace(cluster, device=replace(cluster.device, is_cpu=True))
    with_links, without = (
        step_time(SHAPE, links, sizes, rows=1, microbatches=1, recipe=RECIPE)
        for links in (on_cpus, replace(on_cpus, between=FREE))
    )
    assert with_links.hidden["shard"] == 0.0
    assert step_time(SHAPE, cluster, sizes, rows=1, microbatches=1, recipe=RECIPE).hidden["shard"] > 0.0
    weights = SHAPE.on_rank(sizes, RECIPE, is_fused=False)
    number = weights.block * SHAPE.layers + weights.before + weights.after
    # All weights are gathered forward and backward, and all gradients are scattered.
    moved = number * (2 * RECIPE.gathered_bytes + RECIPE.reduced_bytes)
    calls = 3 * SHAPE.layers * FAR.latency_s
    assert with_links.shard - without.shard == pytest.approx(moved / 2 / FAR.bytes_per_s + calls, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("shard", Parallelism(data=1, shard=8)),
        ("data", Parallelism(data=8)),
        ("context", Parallelism(data=1, context=8)),
        ("tensor", Parallelism(data=1, tensor=8)),
    ],
)
def test_hidden_communication_has_its_kind_and_counts_only_as_contention(
    kind: str, sizes: Parallelism
) -> None:
    step = step_time(SHAPE, CLUSTER, sizes, rows=8, microbatches=8, recipe=replace(RECIPE, hides=0.5))
    assert step.hidden[kind] > 0
    hidden = sum(step.hidden.values())
    assert hidden == pytest.approx(step.hidden[kind] + (step.hidden["shard"] if kind == "context" else 0))
    assert step.contention == pytest.approx(hidden * NEAR.occupies)
    kinds = [value for name, value in vars(step).items() if name != "hidden"]
    assert step.total == pytest.approx(sum(kinds))


def test_recomputation_repeats_a_forward_pass_of_the_blocks() -> None:
    plain, again = time(Parallelism(data=1)), time(Parallelism(data=1, recompute=True))
    assert again.total - plain.total == pytest.approx(again.recomputation)
    assert 0.2 < again.recomputation / plain.compute < 0.4


def test_unknown_devices_and_links_are_refused() -> None:
    with pytest.raises(ParamError, match="There is no device 'h900'; there are v100"):
        make_cluster("h900")
    with pytest.raises(ParamError, match="There is no link 'string'"):
        make_cluster("h100", inside="string")
    with pytest.raises(ParamError, match="a rate above 0, got 0 Gbit/s"):
        make_cluster("h100", between=0.0)
    with pytest.raises(ParamError, match="hosts of a cluster must be a positive number, got 0"):
        make_cluster("h100", hosts=0)


def test_too_many_stages_are_refused() -> None:
    with pytest.raises(ParamError, match="has 16 blocks, too few for 32 stages"):
        time(Parallelism(data=1, pipeline=32))


def test_norms_that_are_not_fused_take_longer() -> None:
    on_cpu = replace(CLUSTER, device=replace(CLUSTER.device, is_cpu=True))
    assert time(ONE, on_cpu).passes > time(ONE).passes


def test_all_to_all_attention_repeats_keys_for_the_ranks_that_lack_them() -> None:
    few = replace(SHAPE, key_heads=2)
    ring, exchanged = (
        few.on_rank(Parallelism(data=1, context=8, attention=method), RECIPE)
        for method in ("ring", "all-to-all")
    )
    assert exchanged.keys == 4 * ring.keys
    assert exchanged.saved - ring.saved == pytest.approx(2 * 3 * ring.keys)
