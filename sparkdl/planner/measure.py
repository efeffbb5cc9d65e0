"""Measures a device by the layers of a model, and the link between the ranks of this machine by their collectives.

The ranks compute at the same time, as in training: on CPUs they share caches and memory. On a machine with a GPU, one
rank measures the layers there, and links stay those of the table.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparkdl.bench.contest import Case, Contest, Measurements, hold
from sparkdl.errors import ParamError
from sparkdl.monitor.memory import available_bytes
from sparkdl.parallel import Parallelism
from sparkdl.planner.cluster import Cluster, Device, Link, known_gpu, link_of_sums, make_cluster
from sparkdl.planner.cost import step_time
from sparkdl.planner.shape import RECIPES, DecoderShape, TrainingRecipe, shape_from_text

_SECONDS = 0.4
_POSITIONS = 1024
"""Most positions of the rows with which layers are measured on CPUs."""

_SMALL, _LARGE = 4 << 10, 16 << 20
"""Bytes of the sums that give the latency and the rate of a link."""

_TINY = 8
"""Rows, columns and depth of a product whose time is that of its start."""


def measured_cluster(
    model: str,
    *,
    sequence: int | None,
    precision: str | None,
    devices_per_host: int,
    inside: str | None,
    between: float | None,
    memory_gib: float | None,
) -> Cluster:
    """Return a cluster of one host like this machine; arguments are those of ``plan`` and ``make_cluster``.

    Raises:
        ParamError: if an argument cannot work, or there are fewer cores than ranks.
        RankError: if a rank failed.
    """
    import torch

    shape = shape_from_text(model, sequence=sequence)
    has_gpu = torch.cuda.is_available()
    precision = precision or ("bfloat16" if has_gpu else "float32")
    if precision not in RECIPES:
        raise ParamError(f"--precision must be one of {', '.join(RECIPES)}, got {precision!r}.")
    cores = len(os.sched_getaffinity(0))
    if not has_gpu and devices_per_host > cores:
        raise ParamError(
            f"--measure runs {devices_per_host} ranks at once, and this machine has {cores} cores. Give "
            f"--devices-per-host {cores}, or fewer."
        )
    device = measure_device(shape, RECIPES[precision], ranks=1 if has_gpu else devices_per_host)
    link: Link | str | None = inside
    if link is None and not has_gpu and devices_per_host > 1:
        link = measure_link(devices_per_host)
    return make_cluster(
        device, devices_per_host=devices_per_host, inside=link, between=between, memory_gib=memory_gib
    )


def measure_device(shape: DecoderShape, recipe: TrainingRecipe, *, ranks: int, rows: int = 1) -> Device:
    """Measure the device of this machine with the layers of a model, while ``ranks`` ranks compute.

    Products, attention and the optimizer are measured by themselves; what a whole block takes longer is the time of its
    other kernels.

    Args:
        shape: the model.
        recipe: how numbers are held.
        ranks: number of ranks.
        rows: number of rows of a pass.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    shape = replace(shape, sequence=shape.sequence if has_gpu else min(shape.sequence, _POSITIONS))
    numbers = shape.on_rank(Parallelism(data=1), recipe, is_fused=has_gpu)
    sizes = {
        "width": shape.width,
        "heads": shape.heads,
        "head_size": shape.queries // shape.heads,
        "is_gated": shape.is_gated,
        "key_heads": shape.key_heads or shape.heads,
        "hidden": shape.inner,
        "vocabulary": shape.vocabulary,
        "positions": shape.sequence,
        "rows": rows,
        "autocast": recipe.compute_bytes == 2,
    }
    products = dict.fromkeys((*numbers.products, *numbers.outside_products))
    cases = {
        f"product {int(n)} x {int(k)}": {"part": "product", "columns": int(n), "depth": int(k)}
        for n, k in products
    }
    cases["start"] = {"part": "product", "columns": _TINY, "depth": _TINY, "positions": _TINY, "rows": 1}
    cases |= {part: {"part": part} for part in ("attention", "block", "head", "update")}
    found = _medians("layers", "native", {name: {**sizes, **case} for name, case in cases.items()}, ranks)
    kernel_s = found["start"] / 3
    of_product = {(n, k): found[f"product {int(n)} x {int(k)}"] for n, k in products}
    operations = sum(6 * rows * numbers.positions * n * k for n, k in products)
    rate = operations / sum(max(seconds - 3 * kernel_s, 0.1 * seconds) for seconds in of_product.values())
    others_s = found["block"] - found["attention"] - sum(of_product[each] for each in numbers.products)
    outside_s = found["head"] - sum(of_product[each] for each in numbers.outside_products)
    rest_s = max(shape.layers * others_s + outside_s, 0.02 * shape.layers * found["block"])
    moved = 3 * rows * recipe.passes * (shape.layers * numbers.moved + numbers.outside_moved)
    updated = numbers.block * (2 * recipe.weight_bytes + recipe.gradient_bytes + 2 * recipe.optimizer_bytes)
    known = _known_gpu() if has_gpu else None
    memory = torch.cuda.mem_get_info()[1] if has_gpu else (available_bytes() or 0) / ranks
    return Device(
        name=known.name if known is not None else torch.cuda.get_device_name() if has_gpu else "cpu",
        peak=known.peak if known is not None else rate,
        float32_peak=known.float32_peak if known is not None else rate,
        rate=rate,
        float32_rate=rate,
        memory_bytes=memory,
        bandwidth=updated / found["update"],
        moved_rate=moved / rest_s,
        attention_rate=3.5 * rows * numbers.attention / found["attention"],
        is_cpu=not has_gpu,
        kernel_s=kernel_s,
        tile_depth=0.0,  # it is in the rate
    )


def measure_link(ranks: int) -> Link:
    """Measure the link between ranks of this machine by sums of two sizes."""
    cases = {str(size): {"num_bytes": size, "num_tensors": 1, "num_buffers": 2} for size in (_SMALL, _LARGE)}
    found = _medians("allreduce", "torch", cases, ranks)
    return link_of_sums(
        {size: found[str(size)] for size in (_SMALL, _LARGE)}, ranks, name="shared memory", occupies=1.0
    )


def compare_here(
    models: Sequence[str] = ("23M", "100M"), *, ranks: int = 2, rows: int = 4, positions: int = 128
) -> list[dict[str, Any]]:
    """Measure the steps of ``sparkdl bench parallel`` on this machine, and predict them from its layers and links.

    Args:
        models: keys of :data:`sparkdl.bench.contenders.parallel.MODELS`.
        ranks: number of ranks.
        rows: rows of a batch.
        positions: positions of a row.

    Returns:
        Rows like those of :func:`sparkdl.planner.published.compare`, of each model under five kinds of parallelism.

    Raises:
        RankError: if a rank failed.
    """
    from sparkdl.bench.contenders.parallel import KINDS, MODELS, sizes_of

    found = []
    link = measure_link(ranks)
    recipe = RECIPES["float32"]
    for name in models:
        size = MODELS[name]
        shape = DecoderShape(
            name=name,
            vocabulary=size.vocabulary,
            width=size.width,
            layers=size.num_layers,
            heads=size.num_heads,
            hidden=math.ceil(8 * size.width / 3 / 32) * 32,
            sequence=positions,
        )
        device = measure_device(shape, recipe, ranks=ranks, rows=rows)
        cluster = make_cluster(device, devices_per_host=ranks, inside=link)
        contest = Contest(
            benchmark="parallel",
            world_size=ranks,
            libraries={f"{kind} on sparkdl": "torch" for kind in KINDS},
            cases=[
                Case(
                    name=name,
                    settings={"model": name, "rows": rows, "positions": positions},
                    max_operations=1,
                )
            ],
            seconds=3.0,
            num_rounds=2,
        )
        measured = hold(contest)[name]
        for kind in KINDS:
            sizes = sizes_of(kind, ranks).resolve(ranks)
            passes = sizes.microbatches or 1
            step = step_time(shape, cluster, sizes, rows=rows / passes, microbatches=passes, recipe=recipe)
            seconds = statistics.median(measured[f"{kind} on sparkdl"].times)
            found.append(
                {
                    "source": "this machine",
                    "run": f"{name}, {kind}",
                    "unit": "s",
                    "measured": seconds,
                    "predicted": step.total,
                    "error": step.total / seconds - 1,
                }
            )
    return found


def _medians(
    benchmark: str, library: str, cases: Mapping[str, Mapping[str, Any]], ranks: int
) -> dict[str, float]:
    """Measure cases on ranks of this machine; return the seconds of each on the slowest rank."""
    contest = Contest(
        benchmark=benchmark,
        world_size=ranks,
        libraries={library: library},
        cases=[Case(name=name, settings=settings) for name, settings in cases.items()],
        seconds=_SECONDS,
        num_rounds=2,
    )
    measured: dict[str, dict[str, Measurements]] = hold(contest)
    return {name: statistics.median(of_case[library].times) for name, of_case in measured.items()}


def _known_gpu() -> Device | None:
    """The entry of this machine's GPU in the table."""
    import torch

    return known_gpu(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1])
