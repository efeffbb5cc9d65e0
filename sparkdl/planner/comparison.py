"""Steps of two decoders on this machine, and what the planner says about each: ``sparkdl plan --validate``.

Runs where it is called. Ranks are processes of this machine, or of hosts that are made of network namespaces.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdl.bench.contenders.scaling_jobs import DECODERS, POSITIONS
from sparkdl.bench.contest import TURN_TIMEOUT_S, announce
from sparkdl.bench.namespaces import limited_hosts
from sparkdl.bench.rank_group import RankGroup
from sparkdl.cores import usable_cores
from sparkdl.parallel import Parallelism
from sparkdl.planner.cluster import Cluster, Link, make_cluster
from sparkdl.planner.cost import step_time
from sparkdl.planner.measure import measure_device, measure_link
from sparkdl.planner.memory import memory_of
from sparkdl.planner.shape import RECIPES, DecoderShape

if TYPE_CHECKING:
    from sparkdl.bench.namespaces import Namespace

ROWS = 8
"""Rows of an update, over all ranks."""

_RECIPE = RECIPES["float32"]
_STEPS = 5


Sizes = Mapping[str, Any]
"""Sizes and options of a ``Parallelism``."""

HERE: Mapping[tuple[int, int], Sequence[Sizes]] = {
    (1, 1): ({"data": 1},),
    (1, 2): (
        {"data": 2},
        {"shard": 2},
        {"shard": 2, "sharding_stage": 2},
        {"tensor": 2},
        {"tensor": 2, "sequence": True},
        {"pipeline": 2, "microbatches": 4},
        {"context": 2},
    ),
    (1, 4): (
        {"data": 4},
        {"shard": 4},
        {"data": 2, "shard": 2},
        {"data": 2, "tensor": 2},
        {"data": 2, "pipeline": 2, "microbatches": 4},
        {"pipeline": 4, "microbatches": 8},
    ),
}
"""Layouts that are trained on one host, by the number of hosts and of ranks of each."""

ACROSS: Mapping[tuple[int, int], Sequence[Sizes]] = {
    (2, 1): (
        {"data": 2},
        {"shard": 2},
        {"tensor": 2},
        {"pipeline": 2, "microbatches": 4},
        {"context": 2},
    ),
    (2, 2): ({"data": 4}, {"data": 2, "tensor": 2}, {"tensor": 2, "pipeline": 2, "microbatches": 4}),
}
"""Layouts that are trained on hosts with links between them, likewise."""

_OPTIONS = {"sharding_stage": "ZeRO", "microbatches": "in"}


def _label(sizes: Sizes) -> str:
    """A short name of a layout."""
    return ", ".join(
        name if value is True else f"{_OPTIONS.get(name, name)} {value}" for name, value in sizes.items()
    )


def shape_of(model: str) -> DecoderShape:
    """Return the shape of one of :data:`~sparkdl.bench.contenders.scaling_jobs.DECODERS`."""
    size = DECODERS[model]
    return DecoderShape(
        name=model,
        vocabulary=size.vocabulary,
        width=size.width,
        layers=size.num_layers,
        heads=size.num_heads,
        hidden=math.ceil(8 * size.width / 3 / 32) * 32,
        sequence=POSITIONS,
    )


def compare_steps(models: Sequence[str], megabits: float | None = None) -> Iterator[dict[str, Any]]:
    """Measure steps of decoders on this machine, and predict each from layers and links measured beside it.

    Args:
        models: keys of :data:`~sparkdl.bench.contenders.scaling_jobs.DECODERS`.
        megabits: rate of the links of hosts that are made; None to train :data:`HERE` on one host.

    Yields:
        A row for each layout: ``model``, ``layout``, ``hosts``, ``ranks``, ``megabits``, ``measured_s`` (median of
        steps on the slowest rank), ``processor_s``, ``kernel_s`` and ``waits_s`` (a rank's processor time in a step,
        the kernel's part of it, and its waits for collectives; means of the ranks), ``predicted_s``, ``ratio``,
        ``step_s`` and ``memory_bytes`` by kind as predicted,
        ``measured_bytes`` (what the fullest rank has grown by) and ``memory_ratio``.

    Raises:
        RankError: if a rank failed.
    """
    trained = HERE if megabits is None else ACROSS
    cores = usable_cores()
    with ExitStack() as stack:
        hosts: Sequence[Namespace] = ()
        if megabits is not None:
            most = max(num_hosts for num_hosts, _ in trained)
            hosts = stack.enter_context(limited_hosts(most, megabits / 1000))
        for (num_hosts, per_host), layouts in trained.items():
            ranks = num_hosts * per_host
            of_ranks = [hosts[rank // per_host] for rank in range(ranks)] if hosts else []
            inside = measure_link(ranks) if per_host > 1 else None
            between: Link | None = None
            if num_hosts > 1:
                between = measure_link(num_hosts, hosts=hosts[:num_hosts])
                between = replace(between, bytes_per_s=between.bytes_per_s / per_host)
            group = stack.enter_context(RankGroup("torch", ranks, hosts=of_ranks))
            group.wait_until_ready()
            for model in models:
                shape, turns = shape_of(model), max(1.0, ranks / cores)
                device = measure_device(shape, _RECIPE, ranks=min(ranks, cores), rows=ROWS, shared_by=turns)
                cluster = make_cluster(
                    device, hosts=num_hosts, devices_per_host=per_host, inside=inside, between=between
                )
                for sizes in layouts:
                    measured = _measure(group, model, sizes, ranks)
                    yield {**_predict(shape, cluster, sizes, measured), **measured, "megabits": megabits}


def _measure(group: RankGroup, model: str, sizes: Sizes, ranks: int) -> dict[str, Any]:
    """The measured part of a row of :func:`compare_steps`."""
    is_plain = set(sizes) == {"data"}
    announce(f"training {model}, {_label(sizes)} on {ranks} ranks")
    turn = {
        "benchmark": "scaling",
        "contender": _label(sizes),
        "repetitions": _STEPS,
        "operations": 1,
        "case": {
            "model": model,
            "rows": ROWS,
            "threads": 1,
            "data": "",
            "device": "cpu",
            "watches_memory": True,
            "way": ("alone" if ranks == 1 else "DataParallel") if is_plain else "",
            "sizes": None if is_plain else dict(sizes),
        },
    }
    answers = group.take_turn(turn, timeout_s=TURN_TIMEOUT_S)
    step_s = statistics.median(
        max(step) for step in zip(*(answer["times"] for answer in answers), strict=True)
    )
    results = [answer["result"] for answer in answers]
    return {
        "measured_s": step_s,
        **{
            f"{name}_s": step_s * statistics.fmean(result[name] or 0.0 for result in results)
            for name in ("processor", "kernel", "waits")
        },
        "measured_bytes": max(result["used_bytes"] for result in results),
    }


def _predict(
    shape: DecoderShape, cluster: Cluster, trained: Sizes, measured: Mapping[str, Any]
) -> dict[str, Any]:
    sizes = Parallelism(**trained).resolve(cluster.world_size)
    assert sizes.data is not None, "resolved"
    passes = sizes.microbatches or 1
    rows = ROWS / (sizes.data * sizes.shard) / passes
    step = step_time(shape, cluster, sizes, rows=rows, microbatches=passes, recipe=_RECIPE)
    memory = memory_of(shape, sizes, rows=rows, microbatches=passes, recipe=_RECIPE, is_cpu=True)
    return {
        "model": shape.name,
        "layout": _label(trained),
        "hosts": cluster.hosts,
        "ranks": cluster.world_size,
        "predicted_s": step.total,
        "ratio": step.total / measured["measured_s"],
        "step_s": vars(step),
        "memory_bytes": vars(memory),
        "memory_ratio": memory.total / measured["measured_bytes"],
    }
