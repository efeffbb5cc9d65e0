"""The memory of a rank, by kind, for a model that is divided in some way.

Sources: S. Rajbhandari et al., "ZeRO" (2020), for weights, gradients and optimizer state; V. A. Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022), for activations and the microbatches in flight.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.errors import ParamError
from sparkdl.parallel.parallelism import SCHEDULES
from sparkdl.parallel.pipeline.parts import balance
from sparkdl.parallel.pipeline.schedules import stages_of_rank

if TYPE_CHECKING:
    from sparkdl.parallel import Parallelism
    from sparkdl.planner.shape import ModelShape, RankNumbers, TrainingRecipe


@dataclass(frozen=True, kw_only=True)
class StagePart:
    """The part of a model that a rank has.

    Attributes:
        rank: number of the rank in its pipeline.
        layers: number of blocks in all of its stages.
        stages: number of its stages.
        has_first: whether it has the parts before the blocks.
        has_last: whether it has the parts after the blocks.
    """

    rank: int
    layers: int
    stages: int
    has_first: bool
    has_last: bool


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on the fullest rank, at the fullest moment of a step.

    Attributes:
        weights: the rank's part of the weights.
        gradients: their gradients, as far as they are there.
        optimizer: state of the optimizer.
        activations: what forward passes have kept for backward passes that are to come.
        buffers: gathered weights of sharded blocks, casts, outputs and their gradients, and the memory in which CPU
            ranks reduce the gradients of replicas.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def parts_of_ranks(
    shape: ModelShape, numbers: RankNumbers, sizes: Parallelism, recipe: TrainingRecipe
) -> Sequence[tuple[StagePart, int]]:
    """Return the different parts of the ranks of a pipeline, cut as :func:`sparkdl.parallel.cut` cuts.

    Returns:
        Each part, of the first rank that has such a part, and the number of ranks that have one.

    Raises:
        ParamError: if there are fewer blocks than stages.
    """
    per_rank = recipe.stages_per_rank or SCHEDULES[sizes.schedule].stages_per_rank
    if sizes.pipeline > 1 and shape.layers < sizes.pipeline * per_rank:
        raise ParamError(
            f"{shape.name} has {shape.layers} blocks, too few for {sizes.pipeline * per_rank} stages. Use fewer."
        )
    schedule = "" if recipe.stages_per_rank else sizes.schedule
    blocks = None if sizes.stage_blocks is None else tuple(sizes.stage_blocks)
    # In blocks, so that all tensor sizes share a result.
    before, after = (round(outside / max(numbers.block, 1), 4) for outside in (numbers.before, numbers.after))
    return _parts(before, after, shape.layers, sizes.pipeline, per_rank, schedule, blocks)


@functools.lru_cache(maxsize=4096)
def _parts(
    before: float,
    after: float,
    layers: int,
    ranks: int,
    per_rank: int,
    schedule: str,
    given: tuple[int, ...] | None,
) -> Sequence[tuple[StagePart, int]]:
    if ranks == 1:
        return ((StagePart(rank=0, layers=layers, stages=1, has_first=True, has_last=True), 1),)
    costs = [1.0] * layers
    costs[0] += before
    costs[-1] += after
    first = balance(costs, ranks * per_rank)
    blocks = given or [end - start for start, end in itertools.pairwise(first)]
    parts: dict[tuple[int, bool, bool], tuple[StagePart, int]] = {}
    for rank in range(ranks):
        in_turn = [rank + number * ranks for number in range(per_rank)]
        stages = stages_of_rank(schedule, rank, ranks) if schedule else in_turn
        key = sum(blocks[number] for number in stages), 0 in stages, ranks * per_rank - 1 in stages
        part = StagePart(rank=rank, layers=key[0], stages=per_rank, has_first=key[1], has_last=key[2])
        earlier, count = parts.get(key, (part, 0))
        parts[key] = earlier, count + 1
    return tuple(parts.values())


def parameters_of(numbers: RankNumbers, part: StagePart) -> int:
    """Return the number of parameters of a rank's part, before it is sharded."""
    number = part.layers * numbers.block + (numbers.before if part.has_first else 0)
    return number + (numbers.after if part.has_last else 0)


def is_sharded(sizes: Parallelism) -> bool:
    """Whether FSDP2 shards the weights or averages the gradients, as for all but plain replicas."""
    replicas = (sizes.data or 1) * sizes.shard * sizes.context
    is_divided = sizes.tensor * sizes.pipeline * sizes.shard * sizes.context > 1
    return replicas > 1 and is_divided


def in_flight(part: StagePart, sizes: Parallelism, microbatches: int) -> float:
    """Number of microbatches whose activations a rank holds at once, as a share of all of its stages.

    With 1F1B, the first of p ranks holds p microbatches; with its interleaved form (v stages on each rank), 1 +
    (p - 1) / (p v) times as much.
    """
    ranks, stages = sizes.pipeline, part.stages
    if ranks == 1:
        return 1.0
    if sizes.schedule in ("gpipe", "looped-bfs"):
        return float(microbatches)
    if stages == 1:
        return float(min(microbatches, ranks - part.rank))
    return min(microbatches * stages, 2 * (ranks - part.rank - 1) + (stages - 1) * ranks + 1) / stages


def memory_of(
    shape: ModelShape,
    sizes: Parallelism,
    *,
    rows: float,
    microbatches: int,
    recipe: TrainingRecipe,
    is_cpu: bool = False,
) -> RankMemory:
    """Return the memory of the fullest rank.

    Args:
        shape: shape of the model.
        sizes: resolved sizes.
        rows: number of rows of a forward pass.
        microbatches: number of forward passes of an update.
        recipe: how numbers are held.
        is_cpu: whether ranks compute on CPUs, where a norm is several kernels, and replicas copy their gradients to
            memory that ranks share.

    Raises:
        ParamError: if a pipeline has more stages than the model has blocks.
    """
    numbers = shape.on_rank(sizes, recipe, is_fused=not is_cpu)
    memories = (
        _of_part(numbers, part, sizes, rows, microbatches, recipe, is_cpu=is_cpu)
        for part, _ in parts_of_ranks(shape, numbers, sizes, recipe)
    )
    return max(memories, key=lambda memory: memory.total)


def _of_part(
    numbers: RankNumbers,
    part: StagePart,
    sizes: Parallelism,
    rows: float,
    microbatches: int,
    recipe: TrainingRecipe,
    *,
    is_cpu: bool,
) -> RankMemory:
    number, shards = parameters_of(numbers, part), sizes.shard * sizes.context
    replicas = (sizes.data or 1) if recipe.divides_optimizer else 1
    outside = number - part.layers * numbers.block
    gradients = number / shards * recipe.gradient_bytes
    buffers = 0.0
    if is_sharded(sizes) and not recipe.divides_optimizer:
        # Stages of a pipeline accumulate whole gradients and keep gathered weights, and so does ZeRO-1.
        if microbatches > 1 and (sizes.pipeline > 1 or sizes.sharding_stage == 1):
            gradients = number * recipe.gradient_bytes
        # The block that computes and the next one; the gradient of one block until it is scattered.
        is_freed = sizes.sharding_stage == 3 and sizes.pipeline == 1
        gathered = outside + 2 * numbers.block if is_freed else number
        buffers += gathered * recipe.gathered_bytes + numbers.block * recipe.reduced_bytes
    elif (sizes.data or 1) > 1 and is_cpu:
        buffers += number * recipe.gradient_bytes
    if recipe.casts:
        buffers += number * recipe.compute_bytes
    kept = numbers.inputs if sizes.recompute else numbers.saved
    activations = rows * part.layers * kept * in_flight(part, sizes, microbatches)
    if sizes.recompute:
        buffers += rows * numbers.saved  # of the block whose gradients are being computed
    passing = 0.0
    if part.has_last:
        activations += rows * numbers.outside_saved
        passing = rows * numbers.outside_passing
    if microbatches == 1:
        # The first backward pass of a block is the fullest moment, or the last one, when all gradients are there.
        begun = numbers.block + (numbers.after if part.has_last else 0)
        begun_bytes = min(begun / shards * recipe.gradient_bytes, gradients)
        if activations + passing + begun_bytes > rows * kept + gradients:
            gradients = begun_bytes
        else:
            activations, passing = rows * kept, 0.0
    return RankMemory(
        weights=number / shards * recipe.weight_bytes,
        gradients=gradients,
        optimizer=number / shards / replicas * recipe.optimizer_bytes,
        activations=activations,
        buffers=buffers + passing,
    )
