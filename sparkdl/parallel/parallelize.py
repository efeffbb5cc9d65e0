"""All kinds of parallelism applied to one model, in the order in which they have to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.errors import ParamError
from sparkdl.parallel.context import WholeSequences, name_of_positions, share_sequences
from sparkdl.parallel.sharding import blocks_of, recompute_activations, shard
from sparkdl.parallel.tensor import divide, divided_layers

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
) -> nn.Module:
    """Divide, share and shard a module as the sizes of a layout say, in place.

    Args:
        module: with equal weights on all ranks, or on the meta device.
        layout: of the ranks. Pipeline stages are not cut here: see :func:`sparkdl.parallel.cut`.
        plan: of tensor parallelism; what the module carries if None.
        whole_outputs: whether the result takes and returns whole sequences and whole vocabularies, as in one process;
            otherwise those of this rank.

    Returns:
        What a step calls: ``module``, or with ``whole_outputs`` and context parallelism a module around it.

    Raises:
        ParamError: if the module cannot be divided so.
    """
    sizes = layout.sizes
    if layout.size("pipeline") > 1:
        raise ParamError(
            "parallelize() does not cut pipeline stages. Call cut() first, and this for each stage."
        )
    if layout.size("tensor") > 1:
        divide(module, layout.mesh["tensor"], plan, sequence=sizes.sequence, whole_outputs=whole_outputs)
    called = module
    if layout.size("context") > 1:
        share_sequences(module, layout.group("context"), method=sizes.attention)
        if whole_outputs:
            called = WholeSequences(module, layout.group("context"))
    blocks = blocks_of(module)
    if sizes.recompute:
        recompute_activations(blocks)
    if layout.size("data", "shard", "context") > 1:
        shard(module, layout, stage=sizes.sharding_stage, blocks=blocks)
    return called


def check_parts(module: nn.Module, sizes: Parallelism) -> None:
    """Check that :func:`parallelize` can divide a module with whole outputs; needs no process group.

    Args:
        module: as it is before.
        sizes: resolved.

    Raises:
        ParamError: if it cannot; the message says what would fit.
    """
    if sizes.pipeline > 1:
        raise ParamError(
            "Param parallelism: an estimator does not cut modules into pipeline stages. Use shard, tensor and context, "
            "or a Runner with sparkdl.parallel.cut and Pipeline."
        )
    if sizes.tensor > 1:
        divided_layers(module, sizes.tensor)
    if sizes.context > 1:
        name_of_positions(module)
