"""Parallelism for models that do not fit into one rank: sharded, tensor, context and pipeline, and all together.

Runs on the *rank*, over an initialized ``torch.distributed``; depends neither on Spark nor on the training loop. Begin
with :mod:`~sparkdl.parallel.parallelism`: :class:`Parallelism` places the kinds of parallelism on the ranks. A model
is then prepared in this order: :func:`cut` into pipeline stages, :func:`divide` layers (tensor),
:func:`share_sequences` (context), :func:`recompute_activations`, :func:`shard`. :func:`parallelize` does all but the
first. :class:`ShardedCheckpoints` saves and loads the result.
"""

from __future__ import annotations

from sparkdl.parallel.attention import all_to_all_attention, ring_attention
from sparkdl.parallel.checkpoint import ShardedCheckpoints
from sparkdl.parallel.context import WholeSequences, share_sequences
from sparkdl.parallel.parallelism import SCHEDULES, Parallelism, RankLayout
from sparkdl.parallel.parallelize import parallelize
from sparkdl.parallel.pipeline.cut import cut
from sparkdl.parallel.pipeline.parts import costs_by_memory, costs_by_time
from sparkdl.parallel.pipeline.pipeline import Pipeline, evaluate_stages
from sparkdl.parallel.pipeline.schedules import num_microbatches, stages_of_rank
from sparkdl.parallel.sharding import (
    accumulated,
    average_gradients,
    blocks_of,
    clip_gradients,
    recompute_activations,
    shard,
)
from sparkdl.parallel.tensor.divide import divide
from sparkdl.parallel.tensor.loss import cross_entropy
from sparkdl.parallel.tensor.plan import tensor_plan_of
from sparkdl.parallel.weights import draw_weights, load_weights, save_weights
from sparkdl.patches.meta_parameters import on_meta

__all__ = [
    "SCHEDULES",
    "Parallelism",
    "Pipeline",
    "RankLayout",
    "ShardedCheckpoints",
    "WholeSequences",
    "accumulated",
    "all_to_all_attention",
    "average_gradients",
    "blocks_of",
    "clip_gradients",
    "costs_by_memory",
    "costs_by_time",
    "cross_entropy",
    "cut",
    "divide",
    "draw_weights",
    "evaluate_stages",
    "load_weights",
    "num_microbatches",
    "on_meta",
    "parallelize",
    "recompute_activations",
    "ring_attention",
    "save_weights",
    "shard",
    "share_sequences",
    "stages_of_rank",
    "tensor_plan_of",
]
