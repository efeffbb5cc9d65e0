"""Published training runs, and what the planner says about each: ``sparkdl plan --published``.

Sources: Megatron-LM's README (Megatron-Core 0.8, images/model_table.png); torchtitan's docs/performance.md (2024), and
llama3_h100_202412_torchtitan.md and asyncTP_llama3_h100_2025-06_torchtitan.md in its benchmarks/.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sparkdl.parallel import Parallelism
from sparkdl.planner.cluster import DEVICES, GIB, STREAMED, USABLE, Cluster, make_cluster
from sparkdl.planner.cost import step_time
from sparkdl.planner.memory import memory_of
from sparkdl.planner.shape import MODELS, DecoderShape, ModelShape, TrainingRecipe

MEGATRON = TrainingRecipe(
    weight_bytes=2,
    gradient_bytes=4,
    optimizer_bytes=12,
    compute_bytes=2,
    gathered_bytes=2,
    reduced_bytes=4,
    keeps_gathered=False,
    divides_optimizer=True,
    hides=0.5,
)
"""Megatron-LM in bfloat16 with its distributed optimizer. ``--tp-comm-overlap`` runs half of the collectives in pieces
beside products; the rest has no product to run beside."""

TITAN = TrainingRecipe(compute_bytes=2, gathered_bytes=2)
"""torchtitan in eager mode: FSDP2 with weights in float32 that computes in bfloat16."""

COMPILED = replace(TITAN, passes=1.0)

_SELECTIVE = 0.5
"""Share of a forward pass that torchtitan's selective recomputation repeats: every second matrix product."""

_POWER = (500 / 700) ** 0.5
"""Clock of an H100 at a limit of 500 W in place of 700 W: power grows with the cube of the clock where the voltage
follows it, and linearly where it does not; the square is between them."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run.

    Attributes:
        source: who published it.
        name: model, and what else tells it from other runs.
        shape: the model.
        cluster: the cluster.
        sizes: its layout.
        recipe: how numbers are held and sent.
        batch: rows of an update.
        rows: rows of a forward pass; None if it is not published, for the fastest that fits.
        recomputed: share of forward passes that are repeated.
        measured: what was measured, in ``unit``.
        unit: ``"TFLOP/s"`` or ``"tokens/s"``, of a device.
    """

    source: str
    name: str
    shape: ModelShape
    cluster: Cluster
    sizes: Parallelism
    recipe: TrainingRecipe
    batch: int
    measured: float
    unit: str
    rows: int | None = None
    recomputed: float = 0.0

    def predict(self) -> float:
        """Return what the planner says, in ``unit``."""
        assert self.sizes.data is not None, "resolved"
        of_reader = self.batch // (self.sizes.data * self.sizes.shard)
        choices = [self.rows] if self.rows else [rows for rows in (1, 2, 4) if of_reader % rows == 0]
        seconds = min(filter(None, (self._seconds(rows, of_reader // rows) for rows in choices)))
        of_row = self.shape.flops_per_row() / 1e12 if self.unit == "TFLOP/s" else self.shape.sequence
        return self.batch * of_row / seconds / self.cluster.world_size

    def _seconds(self, rows: int, passes: int) -> float | None:
        """Seconds of a step.

        None if the run does not publish its rows per pass and ``rows`` gives too few passes or does not fit in memory.
        """
        options: dict[str, Any] = {"rows": rows, "microbatches": passes, "recipe": self.recipe}
        memory = memory_of(self.shape, self.sizes, **options)
        fits = memory.total <= USABLE * self.cluster.device.memory_bytes
        if self.rows is None and (passes < self.sizes.pipeline or not fits):
            return None
        return step_time(self.shape, self.cluster, self.sizes, **options, recomputed=self.recomputed).total


_MEGATRON_ROWS = (
    ("1.7B", 16, 2048, 24, 1, 1, 192, 408.8),
    ("7.1B", 32, 4096, 30, 2, 1, 192, 465.9),
    ("16B", 48, 6144, 32, 4, 1, 192, 489.1),
    ("32B", 56, 7168, 48, 8, 1, 192, 459.6),
    ("70B", 64, 8192, 84, 8, 2, 384, 419.7),
    ("119B", 80, 10240, 92, 8, 4, 768, 420.5),
    ("177B", 96, 12288, 96, 8, 6, 1152, 432.8),
    ("314B", 128, 16384, 96, 8, 8, 1536, 474.4),
    ("462B", 144, 18432, 112, 8, 16, 3072, 459.9),
)


def _of_megatron() -> Iterator[Run]:
    """48 replicas each; pipelines are interleaved with one layer in a stage, as in Megatron's examples."""
    for name, heads, width, layers, tensor, pipeline, batch, measured in _MEGATRON_ROWS:
        shape = DecoderShape(
            vocabulary=131072,
            width=width,
            layers=layers,
            heads=heads,
            sequence=4096,
            is_gated=False,
            has_biases=True,
            name=name,
        )
        stages = layers // pipeline if pipeline > 1 else 0
        yield Run(
            source="Megatron-LM",
            name=f"{name}, tensor {tensor}, pipeline {pipeline}",
            shape=shape,
            cluster=make_cluster("h100", hosts=48 * tensor * pipeline // 8, between=3200.0),
            sizes=Parallelism(
                data=48,
                tensor=tensor,
                pipeline=pipeline,
                sequence=tensor > 1,
                schedule="interleaved-1f1b" if pipeline > 1 else "1f1b",
                stage_blocks=[1] * layers if pipeline > 1 else None,
            ),
            recipe=replace(MEGATRON, stages_per_rank=stages),
            batch=batch,
            measured=measured,
            unit="TFLOP/s",
        )


def _of_titan() -> Iterator[Run]:
    a100 = make_cluster("a100", hosts=8, between=1600.0)
    h100 = replace(
        DEVICES["h100"],
        rate=DEVICES["h100"].rate * _POWER,
        attention_rate=DEVICES["h100"].attention_rate * _POWER,
        bandwidth=2.4e12 * STREAMED,
        moved_rate=2.4e12 * STREAMED,
        memory_bytes=95 * GIB,
    )
    one, eight, sixteen, many = (
        make_cluster(h100, hosts=hosts, between=3200.0, inside="nvlink4") for hosts in (1, 8, 16, 32)
    )
    compiled, eager, select = COMPILED, TITAN, _SELECTIVE
    for name, model, sequence, cluster, tensor, rows, recomputed, recipe, measured in (
        ("Llama 3 8B, A100, selective", "llama-8b", 8192, a100, 1, 1, select, compiled, 2973),
        ("Llama 3 70B, A100, full recomputation", "llama-70b", 8192, a100, 1, 1, 1.0, compiled, 331),
        ("Llama 2 13B, A100", "llama-13b", 4096, a100, 1, 2, 0.0, compiled, 2162),
        ("Llama 2 13B, A100, selective", "llama-13b", 4096, a100, 1, 2, select, compiled, 1914),
        ("Llama 3.1 8B, 8 H100, eager, selective", "llama-8b", 8192, one, 1, 2, select, eager, 5762),
        ("Llama 3.1 8B, 8 H100, selective", "llama-8b", 8192, one, 1, 2, select, compiled, 6667),
        ("Llama 3.1 8B, 128 H100, eager, selective", "llama-8b", 8192, sixteen, 1, 2, select, eager, 5605),
        ("Llama 3.1 8B, 128 H100, selective", "llama-8b", 8192, sixteen, 1, 2, select, compiled, 6514),
        (
            "Llama 3.1 8B, 64 H100, tensor 8, selective",
            "llama-8b",
            8192,
            eight,
            8,
            12,
            select,
            compiled,
            4378,
        ),
        (
            "Llama 3.1 70B, 256 H100, tensor 8, full recomputation",
            "llama-70b",
            8192,
            many,
            8,
            16,
            1.0,
            compiled,
            597.3,
        ),
    ):
        shards = cluster.world_size // tensor
        yield Run(
            source="torchtitan",
            name=name,
            shape=replace(MODELS[model], sequence=sequence),
            cluster=cluster,
            sizes=Parallelism(
                data=1, shard=shards, tensor=tensor, sequence=tensor > 1, recompute=recomputed == 1.0
            ),
            recipe=recipe,
            batch=rows * shards,
            rows=rows,
            recomputed=recomputed,
            measured=measured,
            unit="tokens/s",
        )


def compare() -> list[dict[str, Any]]:
    """Return a row for each published run: ``source``, ``run``, ``unit``, ``measured``, ``predicted`` and ``error``."""
    rows = []
    for run in (*_of_megatron(), *_of_titan()):
        predicted = run.predict()
        rows.append(
            {
                "source": run.source,
                "run": run.name,
                "unit": run.unit,
                "measured": run.measured,
                "predicted": predicted,
                "error": predicted / run.measured - 1,
            }
        )
    return rows
