"""All kinds of parallelism applied to one model, in the required order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.errors import ParamError
from sparkdl.parallel.collectives import begin_equal
from sparkdl.parallel.context import WholeSequences, name_of_positions, share_sequences
from sparkdl.parallel.parallelism import check_sharded_schedule
from sparkdl.parallel.pipeline.cut import check_trainable
from sparkdl.parallel.pipeline.schedules import num_microbatches
from sparkdl.parallel.sharding import blocks_of, check_shardable, recompute_activations, shard
from sparkdl.parallel.tensor.divide import divide
from sparkdl.parallel.tensor.plan import check_heads_shared, divided_layers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from sparkdl.parallel.parallelism import Parallelism, RankLayout


def parallelize(
    module: nn.Module,
    layout: RankLayout,
    *,
    plan: Mapping[str, str] | None = None,
    whole_outputs: bool = False,
    averaged: bool = True,
) -> nn.Module:
    """Apply tensor, context and sharded parallelism to a module by the sizes of a layout, in place.

    Args:
        module: the module, or one on the meta device; with a pipeline, a stage made by :func:`sparkdl.parallel.cut`.
            All ranks that have a part of it begin with the weights and buffers of the first one.
        layout: layout of the ranks.
        plan: plan of tensor parallelism; the plan that the module carries if None. For a stage, the plan itself must
            say which layers return whole outputs: see :func:`sparkdl.parallel.tensor.plan.plan_with_whole_outputs`.
        whole_outputs: whether the result takes and returns whole sequences and whole vocabularies, as in one process;
            otherwise this rank's parts of them.
        averaged: whether backward passes average gradients over ranks with different rows, and weights are sharded;
            otherwise see :func:`sparkdl.parallel.average_gradients`.

    Returns:
        The module to call in a step: ``module``, or, with ``whole_outputs`` and context parallelism, a wrapper of it.

    Raises:
        ParamError: if the module cannot be divided in this way.
    """
    sizes = layout.sizes
    is_stage = getattr(module, "is_pipeline_stage", False)
    if layout.size("pipeline") > 1 and not is_stage:
        raise ParamError(
            "parallelize() does not cut pipeline stages. Call cut() first, and this for each stage."
        )
    if layout.size("tensor") > 1:
        joins_outputs = whole_outputs and not is_stage
        divide(
            module,
            layout.mesh["tensor"],
            plan,
            sequence=sizes.sequence,
            whole_outputs=joins_outputs,
            verify=sizes.verify,
        )
    called = module
    if layout.size("context") > 1:
        group = layout.group("context")
        share_sequences(module, group, method=sizes.attention, verify=sizes.verify)
        if whole_outputs:
            called = WholeSequences(module, group, verify=sizes.verify)
    if sizes.recompute:
        recompute_activations(blocks_of(module))
    if layout.size("data", "shard", "context") > 1:
        if averaged:
            shard(module, layout, stage=sizes.sharding_stage, offload=sizes.offload)
        else:
            begin_equal(module, layout.group("data", "shard", "context"))
    return called


def check_parts(module: nn.Module, sizes: Parallelism, rows: int) -> None:
    """Check that :func:`parallelize` can divide a module with whole outputs; needs no process group.

    Args:
        module: the whole module, before anything is divided.
        sizes: resolved sizes.
        rows: number of rows of a batch.

    Raises:
        ParamError: if it cannot divide the module; the message says what would fit.
    """
    if sizes.pipeline > 1:
        check_trainable(module, sizes.schedule, sizes.pipeline, stage_blocks=sizes.stage_blocks)
        num_microbatches(sizes, rows)
        if sizes.shard * sizes.context > 1:
            check_sharded_schedule(sizes.schedule)
    if sizes.tensor > 1:
        divided_layers(module, sizes.tensor)
    is_divided = sizes.tensor * sizes.pipeline > 1
    if sizes.shard * sizes.context > 1 or ((sizes.data or 1) > 1 and is_divided):
        check_shardable(module)
    if sizes.context > 1:
        name_of_positions(module)
        check_heads_shared(module, sizes.attention, sizes.context)
