"""The layouts of a model on a cluster: which fit, how long a step takes, and which is the fastest.

:func:`plan` enumerates the sizes of :class:`sparkdl.parallel.Parallelism`, estimates memory and time of each, and sorts
them. :mod:`~sparkdl.planner.on_ranks` calls it for ``parallelism="auto"``.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ParamError
from sparkdl.parallel import Parallelism
from sparkdl.parallel.parallelism import DIMENSIONS, SCHEDULES
from sparkdl.parallel.pipeline.schedules import check_microbatches
from sparkdl.planner.cluster import GIB, USABLE, WITHOUT_BFLOAT16, Cluster, advice_on_hosts
from sparkdl.planner.cost import StepTime, step_time
from sparkdl.planner.counting import shape_of_module
from sparkdl.planner.memory import RankMemory, memory_of
from sparkdl.planner.shape import RECIPES, DecoderShape, ModelShape, TrainingRecipe, shape_from_text

if TYPE_CHECKING:
    from torch import nn

MOST_HOSTS = 4096
"""Number of hosts up to which a cluster is sought for a model that does not fit."""

_SCHEDULES = ("1f1b", "interleaved-1f1b")
"""Schedules to choose from. Of the others, those of GPipe need more memory and are no faster, and those that split the
backward pass do not work with sharded stages."""

_LEAST_POSITIONS = 1024
"""Fewest positions of a rank for which a plan divides sequences."""


_MOST_ROWS = 1 << 40
"""Rows of a pass that fit on no device."""

_ENOUGH_MICROBATCHES = 8
"""Microbatches of each pipeline rank from which on more hardly shorten the waiting, at most an eighth of a step."""

_SIMPLER = 0.01
"""Share of the time that each kind of parallelism but replicas must gain: what is simpler fails less."""


_SHARES = {
    "bubble": "waiting in the pipeline takes {} of the step",
    "tensor": "sums among tensor ranks take {} of the step",
    "shard": "gathers of weights and reductions of gradients that no arithmetic hides take {} of the step",
    "data": "sums of gradients over replicas that no arithmetic hides take {} of the step",
    "context": "passing keys and values on takes {} of the step",
    "pipeline": "messages between stages take {} of the step",
    "recomputation": "recomputation, as activations do not fit, takes {} of the step",
}
_FULLEST = {
    "weights": "weights are",
    "gradients": "gradients are",
    "optimizer": "the optimizer's state is",
    "activations": "activations are",
    "buffers": "gathered or cast weights and outputs are",
}

_NOTABLE = 0.05
"""Share of a step from which on the reason names a cost."""


@dataclass(frozen=True, kw_only=True)
class Freedom:
    """What a training program leaves to a plan.

    Attributes:
        dimensions: kinds of parallelism that it supports.
        passes: number of forward passes of an update, besides the microbatches of a pipeline, which needs one pass;
            None for any number.
        suits: whether it can divide the model by these sizes and options.
    """

    dimensions: Collection[str] = DIMENSIONS
    passes: int | None = None
    suits: Callable[[Parallelism], bool] = field(default=lambda _: True)


_ALL = Freedom()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to divide a model on a cluster, with the memory and the time that it takes.

    Attributes:
        parallelism: resolved sizes and options.
        rows: number of rows of a forward pass of a reader.
        passes: number of forward passes of an update: microbatches of a pipeline, otherwise accumulated batches.
        memory: memory of the fullest rank.
        time: time of a step on the slowest rank.
        cluster: the cluster.
        batch: number of rows of an update, over all ranks.
        largest_batch: largest number of rows of an update that fits with this layout and this number of passes.
        utilization: operations of the model per second as a share of the data sheets' of all devices.
        batch_size: rows of a batch of a reader, as an estimator's Param ``batchSize`` counts them.
        accumulated_batches: number of batches of an update, as an estimator's Param ``gradientAccumulationSteps``
            counts them.
    """

    parallelism: Parallelism
    rows: int
    passes: int
    memory: RankMemory
    time: StepTime
    cluster: Cluster
    batch: int
    largest_batch: int
    utilization: float
    batch_size: int
    accumulated_batches: int

    @property
    def label(self) -> str:
        """A short name: sizes other than 1, and options that matter for memory or time."""
        sizes = self.parallelism
        named = [
            f"{name} {getattr(sizes, name)}" for name in reversed(DIMENSIONS) if getattr(sizes, name) > 1
        ]
        if sizes.shard * sizes.context > 1:
            named.append(f"ZeRO-{sizes.sharding_stage}")
        if sizes.pipeline > 1:
            named.append(sizes.schedule.removesuffix("-1f1b"))
        if sizes.context > 1:
            named.append(sizes.attention)
        return ", ".join([*(named or ["one rank"]), *(["recompute"] if sizes.recompute else [])])

    def as_code(self) -> str:
        """Return the ``Parallelism(...)`` to paste."""
        default = Parallelism()
        changed = {
            name: value
            for name, value in vars(self.parallelism).items()
            if value != getattr(default, name) and not (name == "data" and value == 1)
        }
        return f"Parallelism({', '.join(f'{name}={value!r}' for name, value in changed.items()) or 'data=1'})"

    @property
    def reason(self) -> str:
        """A sentence on the largest costs of the layout, and on what fills its memory."""
        time, memory = self.time, self.memory
        shares = {kind: getattr(time, kind) / time.total for kind in _SHARES}
        notable = sorted(
            (kind for kind in shares if shares[kind] >= _NOTABLE), key=lambda kind: -shares[kind]
        )
        costs = " and ".join(_SHARES[kind].format(f"{shares[kind]:.0%}") for kind in notable[:2])
        if not costs:
            costs = f"arithmetic takes {time.compute / time.total:.0%} of the step"
            if sum(time.hidden.values()) > time.exposed:
                costs += " and hides most of the communication"
        fullest = max(_FULLEST, key=lambda kind: getattr(memory, kind))
        share = memory.total / self.cluster.device.memory_bytes
        text = f"{costs}; {_FULLEST[fullest]} the largest part of the {share:.0%} of memory"
        return text[0].upper() + text[1:] + "."

    def as_dict(self) -> dict[str, Any]:
        """Return everything as numbers and texts that JSON can hold."""
        return {
            "parallelism": dict(vars(self.parallelism)),
            "code": self.as_code(),
            "batch": self.batch,
            "batch_size": self.batch_size,
            "accumulated_batches": self.accumulated_batches,
            "largest_batch": self.largest_batch,
            "memory_bytes": {**vars(self.memory), "total": self.memory.total},
            "step_s": {**vars(self.time), "total": self.time.total},
            "rows_per_s": self.batch / self.time.total,
            "utilization": self.utilization,
            "reason": self.reason,
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The layouts of a model on a cluster that fit.

    Attributes:
        shape: shape of the model.
        cluster: the cluster.
        batch: number of rows of an update.
        precision: how numbers are held, a key of :data:`~sparkdl.planner.shape.RECIPES`.
        layouts: layouts that fit, the fastest first, in which each kind of parallelism besides replicas counts one
            percent of the time; never empty.
        num_unfit: number of layouts that do not fit into memory.
    """

    shape: ModelShape
    cluster: Cluster
    batch: int
    precision: str
    layouts: tuple[Layout, ...]
    num_unfit: int

    @property
    def best(self) -> Layout:
        """The fastest layout; among layouts that differ by about a percent, the simplest one."""
        return self.layouts[0]

    @property
    def best_as_code(self) -> str:
        """The best layout to paste: Params of an estimator, or calls of a script where estimators cannot train so."""
        best = self.best
        if self.precision == "bfloat16-shards":
            shard = f"shard(model, layout, stage={best.parallelism.sharding_stage}, dtype=torch.bfloat16)"
            return (
                f'layout = {best.as_code()}.lay_out(device_type="cuda"); {shard}  '
                f"# batches of {best.batch_size} rows, {best.accumulated_batches} in an update"
            )
        params = [f"parallelism={best.as_code()}", f"batchSize={best.batch_size}"]
        if best.accumulated_batches > 1:
            params.append(f"gradientAccumulationSteps={best.accumulated_batches}")
        if self.precision != "float32":
            params.append(f'precision="{self.precision}"')
        return ", ".join(params)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as numbers and texts that JSON can hold."""
        return {
            "model": self.shape.name,
            "parameters": self.shape.parameters,
            "sequence": self.shape.sequence,
            "cluster": str(self.cluster),
            "ranks": self.cluster.world_size,
            "batch": self.batch,
            "precision": self.precision,
            "best": self.best_as_code,
            "num_unfit": self.num_unfit,
            "advice": advice(self.cluster),
            "layouts": [layout.as_dict() for layout in self.layouts],
        }


def plan(
    model: ModelShape | nn.Module | str,
    cluster: Cluster,
    *,
    batch: int,
    precision: str = "bfloat16",
    sequence: int | None = None,
    recipe: TrainingRecipe | None = None,
    freedom: Freedom = _ALL,
) -> Plan:
    """Return the layouts of a model on a cluster, in the order of :class:`Plan`.

    Args:
        model: shape of a model; or a module that is a decoder; or what
            :func:`~sparkdl.planner.shape.shape_from_text` takes. :func:`sparkdl.planner.count` makes a shape of any
            other module.
        cluster: the cluster; see :func:`~sparkdl.planner.cluster.make_cluster`.
        batch: number of rows (sequences) of an update, over all ranks.
        precision: key of :data:`~sparkdl.planner.shape.RECIPES`: ``"float32"`` or ``"bfloat16"``, as an estimator's
            Param ``precision``, or ``"bfloat16-shards"``.
        sequence: number of positions of a row; that of the model if None.
        recipe: how numbers are held and sent, if not as in an estimator with ``precision``.
        freedom: what the training program leaves to the plan.

    Raises:
        ParamError: if an argument cannot work, or no layout fits; the message names the smallest cluster that would do.
    """
    shape = _shape_of(model, sequence)
    if not isinstance(batch, int) or batch < 1:
        raise ParamError(f"batch must be a positive number of rows, got {batch!r}.")
    if precision not in RECIPES:
        raise ParamError(f"precision must be {' or '.join(map(repr, RECIPES))}, got {precision!r}.")
    recipe = recipe or RECIPES[precision]
    task = _Question(shape, batch, precision, recipe, freedom, cluster.world_size)
    layouts = _layouts(task, cluster)
    if not layouts.layouts:
        raise ParamError(_why_none(task, cluster, layouts))
    return layouts


def _shape_of(model: ModelShape | nn.Module | str, sequence: int | None) -> ModelShape:
    if isinstance(model, str):
        return shape_from_text(model, sequence=sequence)
    if isinstance(model, DecoderShape):
        return model if sequence is None else replace(model, sequence=sequence)
    if isinstance(model, ModelShape):
        return model
    return shape_of_module(model, sequence=sequence)


@dataclass(frozen=True)
class _Question:
    """What is planned, on clusters of several sizes."""

    shape: ModelShape
    batch: int
    precision: str
    recipe: TrainingRecipe
    freedom: Freedom
    world_size: int

    def batch_on(self, cluster: Cluster) -> int:
        """Rows of an update on a cluster.

        They are ``batch``, or in proportion to its ranks if the program fixes the number of passes.
        """
        if self.freedom.passes is None:
            return self.batch
        return self.batch // self.world_size * cluster.world_size


def _layouts(task: _Question, cluster: Cluster) -> Plan:
    best: list[Layout] = []
    num_unfit = 0
    for sizes in _sizes(task, cluster):
        layout = _best_of(task, cluster, sizes)
        if layout is None:
            num_unfit += 1
        else:
            best.append(layout)
    return Plan(
        shape=task.shape,
        cluster=cluster,
        batch=task.batch_on(cluster),
        precision=task.precision,
        layouts=tuple(sorted(best, key=_preference)),
        num_unfit=num_unfit,
    )


def _preference(layout: Layout) -> float:
    sizes = layout.parallelism
    complexity: int = sum(getattr(sizes, name) > 1 for name in DIMENSIONS if name != "data")
    return layout.time.total * (1 + _SIMPLER * complexity)


def _best_of(task: _Question, cluster: Cluster, sizes: Parallelism) -> Layout | None:
    """The fastest options of sizes; None if none fits."""
    best: Layout | None = None
    for options, passes_of in _options(task, cluster, sizes):
        if best is not None and options.recompute and sizes.pipeline == 1 and best.passes == passes_of[0][1]:
            break
        for rows, passes in passes_of:
            layout = _estimate(task, cluster, options, rows, passes)
            if layout is None or not task.freedom.suits(options):
                continue
            if best is None or layout.time.total < best.time.total:
                best = layout
            # With fewer rows the arithmetic is slower, and weights are gathered more often; a pipeline waits less.
            if sizes.pipeline == 1 or passes >= _ENOUGH_MICROBATCHES * sizes.pipeline:
                break
    if best is None:
        return None
    usable = USABLE * cluster.device.memory_bytes
    sizes, passes = best.parallelism, best.passes
    rows = (
        best.rows
        - 1
        + bisect.bisect_left(
            range(best.rows, _MOST_ROWS),
            True,
            key=lambda rows: _memory(task, cluster, sizes, rows, passes).total > usable,
        )
    )
    return replace(best, largest_batch=best.batch // best.rows * rows)


def _sizes(task: _Question, cluster: Cluster) -> Iterator[Parallelism]:
    """The sizes that suit the model, the cluster and the batch; tensor ranks share a host where hosts have several."""
    shape, batch, world = task.shape, task.batch_on(cluster), cluster.world_size
    sizes_of = {name: _divisors(world) if name in task.freedom.dimensions else [1] for name in DIMENSIONS}
    most_tensor = cluster.devices_per_host if cluster.devices_per_host > 1 else world
    for tensor, pipeline in itertools.product(sizes_of["tensor"], sizes_of["pipeline"]):
        if (
            world % (tensor * pipeline)
            or tensor > most_tensor
            or most_tensor % tensor
            or pipeline > shape.layers
        ):
            continue
        if pipeline > 1 and task.freedom.passes not in (None, 1):
            continue  # its microbatches are the passes
        for context in sizes_of["context"]:
            rest, left = divmod(world // tensor // pipeline, context)
            if left or batch % rest or (context > 1 and shape.sequence // context < _LEAST_POSITIONS):
                continue
            for shard in sizes_of["shard"]:
                if rest % shard:
                    continue
                sizes = Parallelism(
                    data=rest // shard,
                    shard=shard,
                    tensor=tensor,
                    context=context,
                    pipeline=pipeline,
                    sequence=tensor > 1 and shape.sequence % tensor == 0,
                )
                if shape.why_not(sizes) is None:
                    yield sizes


def _options(
    task: _Question, cluster: Cluster, sizes: Parallelism
) -> Iterator[tuple[Parallelism, list[tuple[int, int]]]]:
    """The options of sizes, each with the possible numbers of rows of a pass, largest first, and of passes."""
    assert sizes.data is not None, "resolved"
    of_reader = task.batch_on(cluster) // (sizes.data * sizes.shard)
    stages = (2, 3) if sizes.shard * sizes.context > 1 else (3,)
    schedules = _SCHEDULES if sizes.pipeline > 1 else (sizes.schedule,)
    methods = ("ring", "all-to-all") if sizes.context > 1 else (sizes.attention,)
    passes_of = [(rows, of_reader // rows) for rows in reversed(_divisors(of_reader))]
    if task.freedom.passes is not None and sizes.pipeline == 1:
        passes_of = [(of_reader // task.freedom.passes, task.freedom.passes)]
    for recompute, stage, schedule, method in itertools.product((False, True), stages, schedules, methods):
        options = replace(
            sizes, recompute=recompute, sharding_stage=stage, schedule=schedule, attention=method
        )
        if sizes.pipeline * SCHEDULES[schedule].stages_per_rank > task.shape.layers:
            continue
        suited = [division for division in passes_of if sizes.pipeline == 1 or _can_cut(options, division[1])]
        if suited and task.shape.why_not(options) is None:
            yield options, suited


def _can_cut(sizes: Parallelism, passes: int) -> bool:
    try:
        check_microbatches(sizes.schedule, sizes.pipeline, passes)
    except ParamError:
        return False
    return True


@functools.lru_cache(maxsize=1024)
def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _estimate(task: _Question, cluster: Cluster, sizes: Parallelism, rows: int, passes: int) -> Layout | None:
    """The layout with its memory and time; None if it does not fit."""
    shape, recipe, batch = task.shape, task.recipe, task.batch_on(cluster)
    needed = _memory(task, cluster, sizes, rows, passes)
    if needed.total > USABLE * cluster.device.memory_bytes:
        return None
    batch_size, accumulated_batches = rows, passes
    if sizes.pipeline > 1:
        sizes, batch_size, accumulated_batches = replace(sizes, microbatches=passes), rows * passes, 1
    time = step_time(shape, cluster, sizes, rows=rows, microbatches=passes, recipe=recipe)
    device = cluster.device
    peak = device.peak if recipe.compute_bytes < 4 else device.float32_peak
    return Layout(
        parallelism=sizes,
        rows=rows,
        passes=passes,
        memory=needed,
        time=time,
        cluster=cluster,
        batch=batch,
        largest_batch=batch,
        utilization=shape.flops_per_row() * batch / time.total / cluster.world_size / peak,
        batch_size=batch_size,
        accumulated_batches=accumulated_batches,
    )


def _memory(task: _Question, cluster: Cluster, sizes: Parallelism, rows: int, passes: int) -> RankMemory:
    is_cpu = cluster.device.is_cpu
    return memory_of(task.shape, sizes, rows=rows, microbatches=passes, recipe=task.recipe, is_cpu=is_cpu)


def _fits(task: _Question, cluster: Cluster) -> bool:
    """Whether any layout fits, with as few rows in a pass as it can have."""
    usable = USABLE * cluster.device.memory_bytes
    state = task.recipe.weight_bytes + task.recipe.gradient_bytes + task.recipe.optimizer_bytes
    if task.shape.parameters * state > usable * cluster.world_size:
        return False
    return any(
        _memory(task, cluster, options, *passes_of[-1]).total <= usable and task.freedom.suits(options)
        for sizes in _sizes(task, cluster)
        for options, passes_of in _options(task, cluster, sizes)
    )


def _why_none(task: _Question, cluster: Cluster, found: Plan) -> str:
    shape, batch = task.shape, task.batch
    size = f"{shape.name} with {shape.parameters / 1e9:.3g} billion parameters"
    if not found.num_unfit:
        return (
            f"No layout of {size} suits {cluster.world_size} ranks and batches of {batch} rows: the rows must be a "
            f"multiple of data x shard. Choose a batch that is a multiple of {cluster.world_size}."
        )
    text = (
        f"{size} fits on {cluster} in none of {found.num_unfit} layouts with batches of {batch} rows of "
        f"{shape.sequence} positions."
    )
    smallest = smallest_number(cluster.hosts, lambda hosts: _fits(task, replace(cluster, hosts=hosts)))
    if smallest is None:
        return f"{text} It would not on {MOST_HOSTS} such hosts either: take devices with more memory."
    hosts, is_exact = smallest
    about = "" if is_exact else "about "
    best = _layouts(task, replace(cluster, hosts=hosts)).best
    return (
        f"{text} The smallest cluster of such hosts on which it fits has {about}{hosts}, with {best.as_code()}. "
        "Shorter rows, or devices with more memory, need fewer."
    )


def smallest_number(least: int, fits: Callable[[int], bool]) -> tuple[int, bool] | None:
    """Return the smallest number of hosts on which something fits, and whether no smaller one would do.

    More than 128 hosts are tried in steps of a power of two, as ranks wait for the answer. Such numbers also divide
    layers, heads and rows best.

    Args:
        least: number of hosts on which it does not fit.
        fits: whether it fits on a number of hosts. It may fit on fewer than another number on which it does not.

    Returns:
        None if it does not fit on :data:`MOST_HOSTS` either.
    """
    most = least
    while not fits(most):
        if most >= MOST_HOSTS:
            return None
        most = min(2 * most, MOST_HOSTS)
    step = 1 << max(0, most.bit_length() - 8)
    fewer = range(step * (least // step + 1), most, step)
    return next(filter(fits, fewer), most), step == 1


def advice(cluster: Cluster) -> list[str]:
    """Return how ranks of a cluster had best communicate, by the number of hosts and the kind of their links."""
    texts = []
    if cluster.device.name in WITHOUT_BFLOAT16:
        texts.append(
            f"A {cluster.device.name} has no units for bfloat16, and the times above are those of float16: with "
            'precision="bfloat16" steps take longer.'
        )
    if cluster.hosts == 1:
        return [
            *texts,
            f"Ranks of one host use {'shared memory' if cluster.device.is_cpu else 'NCCL'} without any setting.",
        ]
    of_host = cluster.between.bytes_per_s * cluster.devices_per_host
    texts += advice_on_hosts(cluster.hosts, of_host, is_cpu=cluster.device.is_cpu)
    if of_host / GIB < 1.0:
        texts.append("sparkdl doctor measures whether the link reaches the rate that was given here.")
    return texts
