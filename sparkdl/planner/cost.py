"""The time of a training step, by kind, for a model that is divided in some way on a cluster.

Sources: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021), for the bubble of
a pipeline and the communication of tensor parallelism; T. Dao, "FlashAttention-2" (2023), for the operations of
attention; :mod:`sparkdl.planner.cluster` has the time of collectives.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sparkdl.planner.memory import StagePart, is_sharded, parameters_of, parts_of_ranks

if TYPE_CHECKING:
    from sparkdl.parallel import Parallelism
    from sparkdl.planner.cluster import Cluster, Device, Link
    from sparkdl.planner.shape import ModelShape, RankNumbers, TrainingRecipe

ATTENTION_BACKWARD = 2.5
"""Products of attention in a backward pass, five, as a multiple of the two of a forward pass (Dao 2023)."""

COMMUNICATION = ("tensor", "context", "shard", "data", "pipeline")
"""Kinds of communication."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step on the slowest rank, by kind. Communication counts as far as no arithmetic hides it.

    Attributes:
        products: matrix products.
        attention: attention kernels.
        passes: norms, activations, losses and other kernels that move memory.
        recomputation: forward passes that are done again in backward passes.
        optimizer: update of the weights.
        tensor: sums and gathers among tensor ranks.
        context: exchange of keys and values among context ranks.
        shard: gathers of weights, and reduction of gradients, among shards.
        data: reduction of gradients among replicas.
        pipeline: messages between stages.
        bubble: waiting for the first and the last microbatches of a pipeline.
        hidden: communication that arithmetic hides, by its kind; not part of the total, except for :attr:`contention`.
        contention: arithmetic that is slower because communication goes on at the same time.
    """

    products: float = 0.0
    attention: float = 0.0
    passes: float = 0.0
    recomputation: float = 0.0
    optimizer: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    shard: float = 0.0
    data: float = 0.0
    pipeline: float = 0.0
    bubble: float = 0.0
    hidden: dict[str, float] = field(default_factory=dict)
    contention: float = 0.0

    @property
    def compute(self) -> float:
        """Seconds of arithmetic, including recomputation and the optimizer."""
        return (
            self.products
            + self.attention
            + self.passes
            + self.recomputation
            + self.optimizer
            + self.contention
        )

    @property
    def exposed(self) -> float:
        """Seconds of communication that no arithmetic hides."""
        return self.tensor + self.context + self.shard + self.data + self.pipeline

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return self.compute + self.exposed + self.bubble


@dataclass(frozen=True)
class _Arithmetic:
    """Seconds of a forward pass, or of its backward pass."""

    products: float
    attention: float
    passes: float

    @property
    def total(self) -> float:
        return self.products + self.attention + self.passes


_NOTHING = _Arithmetic(0.0, 0.0, 0.0)


def _arithmetic(
    numbers: RankNumbers, rows: float, device: Device, recipe: TrainingRecipe, *, is_block: bool
) -> tuple[_Arithmetic, _Arithmetic]:
    """Return the time of a forward pass and of its backward pass, in which each product becomes two."""
    rate = device.float32_rate if recipe.compute_bytes == 4 else device.rate

    def product_s(rows: float, columns: float, depth: float) -> float:
        return device.kernel_s + 2 * rows * columns * (depth + device.tile_depth) / rate

    def weights_s(columns: float, depth: float) -> float:
        return columns * depth * recipe.compute_bytes / device.weights_rate

    m = rows * numbers.positions
    products = numbers.products if is_block else numbers.outside_products
    attention = rows * numbers.attention / device.attention_rate * device.rate / rate if is_block else 0.0
    moved = rows * (numbers.moved if is_block else numbers.outside_moved)
    passes = recipe.passes * moved / device.moved_rate + (device.block_s / 3 if is_block else 0.0)
    forward = sum(product_s(m, n, k) + weights_s(n, k) for n, k in products)
    backward = sum(product_s(m, k, n) + product_s(n, k, m) + 2 * weights_s(n, k) for n, k in products)
    return (
        _Arithmetic(forward, attention, passes),
        _Arithmetic(backward, ATTENTION_BACKWARD * attention, 2 * passes),
    )


@dataclass
class _Communication:
    """Communication by kind: what shows, what arithmetic hides, and how much that slows the arithmetic down."""

    exposed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COMMUNICATION, 0.0))
    hidden: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COMMUNICATION, 0.0))
    contention: float = 0.0

    def add(self, kind: str, seconds: float, beside: float, link: Link, times: float = 1.0) -> None:
        """Add communication of some seconds beside arithmetic of some seconds, a number of times."""
        hidden = min(seconds, beside)
        self.exposed[kind] += times * (seconds - hidden)
        self.hidden[kind] += times * hidden
        self.contention += times * hidden * link.occupies


def step_time(
    shape: ModelShape,
    cluster: Cluster,
    sizes: Parallelism,
    *,
    rows: float,
    microbatches: int,
    recipe: TrainingRecipe,
    recomputed: float | None = None,
) -> StepTime:
    """Return the time of a step.

    Args:
        shape: shape of the model.
        cluster: cluster whose ranks the sizes divide.
        sizes: resolved sizes.
        rows: number of rows of a forward pass.
        microbatches: number of forward passes of an update.
        recipe: how numbers are held and sent.
        recomputed: share of each forward pass that is done again in the backward pass; 1 or 0 by ``sizes`` if None.

    Raises:
        ParamError: if a pipeline has more stages than the model has blocks.
    """
    share = float(sizes.recompute) if recomputed is None else recomputed
    numbers = shape.on_rank(sizes, recipe, is_fused=not cluster.device.is_cpu)
    parts = parts_of_ranks(shape, numbers, sizes, recipe)
    steps = [_of_part(numbers, cluster, part, sizes, rows, microbatches, recipe, share) for part, _ in parts]
    slowest = max(steps, key=lambda step: step.total)
    others = sum(
        count * _in_microbatches(step) for step, (_, count) in zip(steps, parts, strict=True)
    ) - _in_microbatches(slowest)
    waiting = others / microbatches / parts[0][0].stages
    # Ranks that take turns on a device fill each other's waiting: alone, a rank would compute so many times faster.
    working, turns = _in_microbatches(slowest), cluster.device.shared_by
    return replace(slowest, bubble=max(0.0, (working + waiting) / turns - working))


def _in_microbatches(step: StepTime) -> float:
    return step.total - step.optimizer - step.shard - step.data


def _of_part(
    numbers: RankNumbers,
    cluster: Cluster,
    part: StagePart,
    sizes: Parallelism,
    rows: float,
    microbatches: int,
    recipe: TrainingRecipe,
    recomputed: float,
) -> StepTime:
    device, layers = cluster.device, part.layers
    block, back = _arithmetic(numbers, rows, device, recipe, is_block=True)
    outside = outside_back = _NOTHING
    if part.has_last:
        outside, outside_back = _arithmetic(numbers, rows, device, recipe, is_block=False)
    sent = _Communication()
    tensor = _tensor_s(cluster, sizes, rows * numbers.summed) * (2 + recomputed)
    sums = microbatches * layers * tensor
    sent.add("tensor", sums, sums * recipe.hides, cluster.group(1, sizes.tensor).link)
    _share_sequences(
        sent, numbers, cluster, sizes, rows, recipe, block.attention, microbatches * layers, recomputed
    )
    number = parameters_of(numbers, part)
    beside = block.total, back.total + recomputed * block.total
    _replicas(sent, numbers, cluster, part, sizes, microbatches, recipe, beside)
    stride = sizes.tensor * sizes.context * sizes.shard * (sizes.data or 1)
    next_stage = cluster.group(stride, sizes.pipeline)
    messages = 2 * microbatches * part.stages * next_stage.send_s(rows * numbers.inputs)
    sent.add("pipeline", messages, messages * recipe.hides, next_stage.link)
    shards = sizes.shard * sizes.context * ((sizes.data or 1) if recipe.divides_optimizer else 1)
    moved = 2 * recipe.weight_bytes + recipe.gradient_bytes + 2 * recipe.optimizer_bytes
    added: float = 2 * recipe.gradient_bytes * number * (microbatches - 1)
    if is_sharded(sizes) and sizes.pipeline == 1 and sizes.sharding_stage > 1:
        added /= sizes.shard * sizes.context
    return StepTime(
        products=microbatches
        * (layers * (block.products + back.products) + outside.products + outside_back.products),
        attention=microbatches * layers * (block.attention + back.attention),
        passes=microbatches * (layers * (block.passes + back.passes) + outside.passes + outside_back.passes)
        + added / device.bandwidth,
        recomputation=microbatches * layers * recomputed * block.total,
        optimizer=number / shards * moved / device.bandwidth,
        **sent.exposed,
        hidden=sent.hidden,
        contention=sent.contention,
    )


def _tensor_s(cluster: Cluster, sizes: Parallelism, num_bytes: float) -> float:
    """Seconds that tensor ranks communicate for a forward pass of a block; a backward pass takes as long.

    Two allreduces of a block's output, or with ``sequence`` two gathers and two reduce-scatters, which move as much.
    """
    if sizes.tensor == 1:
        return 0.0
    group = cluster.group(1, sizes.tensor)
    return 4 * group.gather_s(num_bytes) if sizes.sequence else 2 * group.reduce_s(num_bytes)


def _share_sequences(
    sent: _Communication,
    numbers: RankNumbers,
    cluster: Cluster,
    sizes: Parallelism,
    rows: float,
    recipe: TrainingRecipe,
    attention: float,
    passes: float,
    recomputed: float,
) -> None:
    """Add the exchange of keys and values of ranks that share sequences, for a number of forward passes of a block."""
    if sizes.context == 1:
        return
    group = cluster.group(sizes.tensor, sizes.context)
    queries, keys = rows * numbers.queries, rows * numbers.keys
    if sizes.attention == "all-to-all":
        seconds = 2 * group.exchange_s(queries) + 2 * group.exchange_s(keys)
        sent.add("context", seconds, 0.0, group.link, passes * (2 + recomputed))
        return
    steps = sizes.context - 1
    forward = 2 * steps * group.send_s(keys)
    gradients = 2 * sizes.context * group.send_s(keys * 4 / recipe.compute_bytes)  # in float32
    sent.add("context", forward, attention, group.link, passes * (1 + recomputed))
    sent.add("context", forward + gradients, ATTENTION_BACKWARD * attention, group.link, passes)
    # Each block's result is read, and merged with the float32 results before.
    merged = steps * (queries + 2 * queries * 4 / recipe.compute_bytes) / cluster.device.moved_rate
    sent.exposed["context"] += passes * (2 + recomputed) * merged


def _replicas(
    sent: _Communication,
    numbers: RankNumbers,
    cluster: Cluster,
    part: StagePart,
    sizes: Parallelism,
    microbatches: int,
    recipe: TrainingRecipe,
    beside: tuple[float, float],
) -> None:
    """Add the communication of ranks that train on different rows.

    On GPUs, FSDP2 gathers a block's weights while the block before computes, and scatters its gradients while the next
    one's are computed; on CPUs it waits for each of its collectives. It copies a rank's part of the weights into the
    buffer of a gather, on the stream of the gather, and all weights out of it, and gradients into the buffer of a
    scatter, on the stream of the arithmetic (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py). Replicas reduce
    the gradients of an update in its last backward pass. A pipeline reduces them at its end.
    """
    device = cluster.device
    waits = device.is_cpu and is_sharded(sizes)
    forward, backward = (0.0, 0.0) if waits else beside
    data = sizes.data or 1
    shards = sizes.shard * sizes.context
    inner = cluster.group(sizes.tensor, shards)
    outer = cluster.group(sizes.tensor * shards, data)
    block, number = numbers.block, parameters_of(numbers, part)
    outside = number - part.layers * block
    is_pipeline = sizes.pipeline > 1

    def weights_s(count: float) -> float:
        part_bytes = count * recipe.gathered_bytes / shards
        into_s = device.copy_s(part_bytes, part_bytes)
        if recipe.gathered_bytes != recipe.weight_bytes:  # it is cast before
            into_s += device.copy_s(count * recipe.weight_bytes / shards, part_bytes)
        return into_s + inner.gather_s(count * recipe.gathered_bytes)

    if shards > 1:
        link = inner.link
        gather, first = weights_s(block), weights_s(outside + block)
        again = gather if sizes.sharding_stage == 3 else 0.0
        scatter = inner.gather_s(block * recipe.reduced_bytes)
        reductions = 0 if is_pipeline else microbatches if sizes.sharding_stage > 1 else 1
        sent.add("shard", gather, forward, link, microbatches * (part.layers - 1))
        sent.add("shard", again + scatter, backward, link, reductions * (part.layers - 1))
        sent.add("shard", again, backward, link, (microbatches - reductions) * (part.layers - 1))
        sent.add("shard", first + (first if again else 0.0), 0.0, link, microbatches)
        last = inner.gather_s((outside + block) * recipe.reduced_bytes)
        sent.add("shard", last, 0.0, link, max(1, reductions))
        if is_pipeline:
            sent.add("shard", scatter, 0.0, link, part.layers - 1)
        weights, gradients = number * recipe.gathered_bytes, number * recipe.reduced_bytes
        sent.exposed["shard"] += microbatches * (2 if again else 1) * device.copy_s(weights, weights)
        sent.exposed["shard"] += max(1, reductions) * device.copy_s(weights, gradients)
    if data > 1:
        link = outer.link
        share = recipe.reduced_bytes / shards
        reduce = outer.gather_s if recipe.divides_optimizer else outer.reduce_s
        # Small reductions are joined, so that the latency of one is for all blocks.
        of_all = reduce(number * share)
        last = reduce((outside + block) * share)
        hides = 0.0 if is_pipeline and not recipe.divides_optimizer else backward * (part.layers - 1)
        sent.add("data", max(0.0, of_all - last), hides, link)
        # Replicas alone copy the gradients of autograd to where they are reduced.
        copied = number * recipe.gradient_bytes
        copies = 0.0 if is_sharded(sizes) else device.copy_s(copied, copied)
        sent.add("data", last + copies, 0.0, link)
        if recipe.divides_optimizer:
            gathered = outer.gather_s(number * recipe.gathered_bytes)
            sent.add("data", gathered, forward * (part.layers - 1), link)
