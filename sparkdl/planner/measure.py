"""Measures a device by the layers of a model, and the link between the ranks of this machine by their collectives.

The ranks compute at the same time, as in training: on CPUs they share caches and memory. On a machine with GPUs, one
rank measures the layers, and a rank on each GPU the link between them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdl.bench.contest import TURN_TIMEOUT_S, Case, announce, hold
from sparkdl.bench.rank_group import RankGroup
from sparkdl.host_memory import available_bytes
from sparkdl.parallel import Parallelism
from sparkdl.planner.cluster import Device, Link, known_gpu, link_of_sums
from sparkdl.planner.shape import DecoderShape, TrainingRecipe
from sparkdl.planner.sums import SumTimes

if TYPE_CHECKING:
    from sparkdl.bench.namespaces import Namespace

_SECONDS = 0.4
_POSITIONS = 1024
"""Most positions of the rows with which layers are measured on CPUs."""

_BLOCKS_BYTES = 64 << 20
"""Bytes of the weights of blocks that are measured together."""

_TINY = 8
"""Rows, columns and depth of a product whose time is that of its start."""


def measure_device(
    shape: DecoderShape, recipe: TrainingRecipe, *, ranks: int, rows: int = 1, shared_by: float = 1.0
) -> Device:
    """Measure the device of this machine with the layers of a model, while ``ranks`` ranks compute.

    Products, attention and the optimizer are measured by themselves; what whole blocks take longer is the time of their
    other kernels. All are measured with the rows and with a quarter of their positions, which tells what grows with
    them from what does not: the reading of weights, the writing of gradients and the start of kernels.

    Args:
        shape: the model.
        recipe: how numbers are held.
        ranks: number of ranks.
        rows: number of rows of a pass.
        shared_by: number of ranks that take turns on the device in the plan.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    shape = replace(shape, sequence=shape.sequence if has_gpu else min(shape.sequence, _POSITIONS))
    fewer = (rows // 4, shape.sequence) if rows >= 4 else (rows, max(1, shape.sequence // 4))
    numbers = shape.on_rank(Parallelism(data=1), recipe, is_fused=has_gpu)
    blocks = max(1, min(shape.layers, int(_BLOCKS_BYTES / (numbers.block * recipe.weight_bytes))))
    sizes = {
        "width": shape.width,
        "heads": shape.heads,
        "head_size": shape.queries // shape.heads,
        "is_gated": shape.is_gated,
        "key_heads": shape.key_heads or shape.heads,
        "hidden": shape.inner,
        "vocabulary": shape.vocabulary,
        "blocks": blocks,
        "autocast": recipe.compute_bytes == 2,
    }
    products = dict.fromkeys((*numbers.products, *numbers.outside_products))
    parts = {
        **{f"product {int(n)} x {int(k)}": ("product", int(n), int(k)) for n, k in products},
        "attention": ("attention", 0, 0),
        "blocks": ("blocks", 0, 0),
        "head": ("head", 0, 0),
    }
    cases: dict[str, dict[str, Any]] = {
        "start": {"part": "product", "columns": _TINY, "depth": _TINY, "positions": _TINY, "rows": 1},
        "update": {"part": "update", "positions": 1, "rows": 1},
    }
    measured = (rows, shape.sequence), fewer
    for number, positions in measured:
        cases |= {
            f"{name}, {number} x {positions}": {
                "part": part,
                "columns": columns,
                "depth": depth,
                "rows": number,
                "positions": positions,
            }
            for name, (part, columns, depth) in parts.items()
        }
    results = hold(
        "layers",
        world_size=ranks,
        libraries={"native": "native"},
        cases=[Case(name=name, settings={**sizes, **case}) for name, case in cases.items()],
        seconds=_SECONDS,
        num_rounds=2,
    )
    seconds_of = {name: shared_by * statistics.median(part["native"].times) for name, part in results.items()}
    kernel_s = seconds_of["start"] / 3
    of_products, of_others = [], []
    for number, positions in measured:
        at = f", {number} x {positions}"
        part = replace(shape, sequence=positions).on_rank(Parallelism(data=1), recipe, is_fused=has_gpu)
        of_product = {(n, k): seconds_of[f"product {int(n)} x {int(k)}{at}"] for n, k in products}
        for (n, k), seconds in of_product.items():
            operations = 6 * number * positions * n * k
            of_products.append(
                (operations, 3 * n * k * recipe.compute_bytes, max(seconds - 3 * kernel_s, 0.1 * seconds))
            )
        block = seconds_of[f"blocks{at}"] / blocks
        others = block - seconds_of[f"attention{at}"] - sum(of_product[product] for product in part.products)
        of_others.append((3 * number * recipe.passes * part.moved, 1.0, max(others, 0.01 * block)))
        head = seconds_of[f"head{at}"]
        others = head - sum(of_product[product] for product in part.outside_products)
        of_others.append((3 * number * recipe.passes * part.outside_moved, 0.0, max(others, 0.01 * head)))
    operation_s, weights_s = _shares(of_products)
    moved_s, block_s = _shares(of_others)
    updated = float(blocks * numbers.block)
    updated *= 2 * recipe.weight_bytes + recipe.gradient_bytes + 2 * recipe.optimizer_bytes
    attention_s = seconds_of[f"attention, {rows} x {shape.sequence}"]
    memory = torch.cuda.mem_get_info()[1] if has_gpu else (available_bytes() or 0) / ranks / shared_by
    known = known_gpu(torch.cuda.get_device_name(), memory) if has_gpu else None
    rate = 1 / operation_s
    return Device(
        name=known.name if known is not None else torch.cuda.get_device_name() if has_gpu else "cpu",
        peak=known.peak if known is not None else rate,
        float32_peak=known.float32_peak if known is not None else rate,
        rate=rate,
        float32_rate=rate,
        memory_bytes=memory,
        bandwidth=updated / seconds_of["update"],
        moved_rate=1 / max(moved_s, 1e-15),
        attention_rate=3.5 * rows * numbers.attention / attention_s,
        is_cpu=not has_gpu,
        kernel_s=kernel_s,
        tile_depth=0.0,  # it is in the rate
        weights_rate=1 / max(weights_s, 1e-15),
        block_s=block_s,
        shared_by=shared_by,
    )


def _shares(samples: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Seconds of one unit of two kinds of work that explain measured times best: the first above zero, or both.

    Args:
        samples: units of both kinds and seconds of each measurement; they are fitted by their relative errors.
    """
    best = (math.inf, 0.0, 0.0)
    scaled = [(first / seconds, second / seconds) for first, second, seconds in samples]
    aa, bb = sum(a * a for a, _ in scaled), sum(b * b for _, b in scaled)
    ab, a1, b1 = sum(a * b for a, b in scaled), sum(a for a, _ in scaled), sum(b for _, b in scaled)
    determinant = aa * bb - ab * ab
    choices = [(a1 / aa, 0.0)]
    if determinant > 1e-9 * aa * bb:
        choices.append(((a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant))
    for x, y in choices:
        if x > 0 and y >= 0:
            error = sum((a * x + b * y - 1) ** 2 for a, b in scaled)
            best = min(best, (error, x, y))
    return best[1:]


def measure_link(ranks: int, *, hosts: Sequence[Namespace] = (), on_gpus: bool = False) -> Link:
    """Measure the link between ranks of this machine, or of hosts on it, as ranks do that choose their layout.

    Args:
        ranks: number of ranks.
        hosts: the host of each rank; empty for ranks on this machine.
        on_gpus: whether each rank has a GPU, and they sum by NCCL.

    Raises:
        RankError: if a rank failed, such as one that does not find NCCL.
    """
    library, device = ("own nccl", "cuda") if on_gpus else ("torch", "cpu")
    name = "link between GPUs" if on_gpus else "link" if hosts else "shared memory"
    announce(f"measuring the link between {ranks} ranks")
    turn = {"benchmark": "sums", "contender": library, "case": {"device": device}}
    with RankGroup(library, ranks, hosts=hosts) as group:
        group.wait_until_ready()
        answers = group.take_turn({**turn, "repetitions": 1, "operations": 1}, timeout_s=TURN_TIMEOUT_S)
    return link_of_sums(SumTimes(**answers[0]["result"]), ranks, name=name, is_cpu=not on_gpus)
