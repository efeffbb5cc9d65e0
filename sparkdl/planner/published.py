"""Published training runs, and what the planner says about each: ``sparkdl plan --published``.

Sources: Megatron-LM's README (Megatron-Core 0.8, images/model_table.png); torchtitan's docs/performance.md (2024), and
llama3_h100_202412_torchtitan.md and asyncTP_llama3_h100_2025-06_torchtitan.md in its benchmarks/; D. Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021), table 2 and section 5.4; and
Y. Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023), section 5.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparkdl.parallel import Parallelism
from sparkdl.planner.cluster import DEVICES, GIB, STREAMED, USABLE, Cluster, Device, make_cluster
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

MEGATRON_2021 = replace(
    MEGATRON, gradient_bytes=2, reduced_bytes=2, keeps_gathered=True, divides_optimizer=False, hides=0.0
)
"""Megatron-LM in float16 before it had a distributed optimizer and overlapped its communication."""

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
        measured: what was measured, in ``unit``; None if only the order of several layouts is published.
        unit: ``"TFLOP/s"`` or ``"tokens/s"``, of a device.
    """

    source: str
    name: str
    shape: ModelShape
    cluster: Cluster
    sizes: Parallelism
    recipe: TrainingRecipe
    batch: int
    measured: float | None = None
    unit: str = "tokens/s"
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
    """Yield Megatron-LM's runs. Each has 48 replicas; pipelines are interleaved, with one layer in a stage."""
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


def _titan_h100() -> Device:
    return replace(
        DEVICES["h100"],
        rate=DEVICES["h100"].rate * _POWER,
        attention_rate=DEVICES["h100"].attention_rate * _POWER,
        bandwidth=2.4e12 * STREAMED,
        moved_rate=2.4e12 * STREAMED,
        memory_bytes=95 * GIB,
    )


def _of_titan() -> Iterator[Run]:
    a100 = make_cluster("a100", hosts=8, between=1600.0)
    h100 = _titan_h100()
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


def _of_papers() -> Iterator[Run]:
    """Runs on A100 whose published operations count the second forward pass.

    Megatron-LM's have pipelines that are interleaved with one layer in a stage, as its newer runs above.
    """
    for name, width, layers, heads, pipeline, batch, runs in (
        ("175B", 12288, 96, 96, 12, 1536, ((384, 153), (768, 149), (1536, 141))),
        ("530B", 20480, 105, 128, 35, 2240, ((560, 171), (1120, 167), (2240, 159))),
    ):
        shape = _gpt(name, width, layers, heads)
        for gpus, teraflops in runs:
            yield Run(
                source="Narayanan 2021",
                name=f"{name}, {gpus} A100, tensor 8, pipeline {pipeline}",
                shape=shape,
                cluster=make_cluster("a100", hosts=gpus // 8, between=1600.0),
                sizes=Parallelism(
                    data=gpus // (8 * pipeline),
                    tensor=8,
                    pipeline=pipeline,
                    schedule="interleaved-1f1b",
                    stage_blocks=[1] * layers,
                    recompute=True,
                ),
                recipe=replace(MEGATRON_2021, stages_per_rank=layers // pipeline),
                batch=batch,
                rows=1,
                recomputed=1.0,
                measured=_tokens_per_s(shape, teraflops),
                unit="tokens/s",
            )
    shape = replace(_gpt("175B", 12288, 96, 96), vocabulary=50000)
    for rows, teraflops in ((1, 173), (2, 186)):
        yield Run(
            source="Zhao 2023",
            name=f"175B, 512 A100, shard 512, {rows} row{'s' * (rows > 1)} each",
            shape=shape,
            cluster=make_cluster("a100", hosts=64, between=2000.0),
            sizes=Parallelism(data=1, shard=512, recompute=True),
            recipe=replace(TITAN, reduced_bytes=2),
            batch=512 * rows,
            rows=rows,
            recomputed=1.0,
            measured=_tokens_per_s(shape, teraflops),
            unit="tokens/s",
        )


def _tokens_per_s(shape: DecoderShape, teraflops: float) -> float:
    """Tokens per second of a published rate, by equation (3) of Narayanan et al., which counts two forward passes."""
    width, layers = shape.width, shape.layers
    of_token = 96.0 * layers * width**2
    of_token *= 1 + shape.sequence / (6 * width) + shape.vocabulary / (16 * layers * width)
    return teraflops * 1e12 / of_token


def compare() -> list[dict[str, Any]]:
    """Return a row for each published run: ``source``, ``run``, ``unit``, ``measured``, ``predicted`` and ``error``."""
    rows = []
    for run in (*_of_megatron(), *_of_titan(), *_of_papers()):
        assert run.measured is not None
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


@dataclass(frozen=True, kw_only=True)
class Order:
    """Published layouts of one job on one cluster.

    Attributes:
        job: model, cluster and batch.
        runs: runs that differ in their layouts alone; the first one is the fastest.
        is_sorted: whether the others are in the order of their speed, too.
    """

    job: str
    runs: Sequence[Run]
    is_sorted: bool


def orders() -> Iterator[Order]:
    """Yield jobs for which the speeds of several layouts are published.

    torchtitan's runs of 405B compute in float8, which the planner does not know; that makes all of them faster alike.
    They have its default, as many microbatches as ranks in a pipeline. Narayanan et al. give the order alone, in
    section 5.4, for microbatches of one row.
    """
    llama, batch = MODELS["llama-405b"], 256
    options: dict[str, Any] = {"data": 1, "shard": 8, "tensor": 8, "pipeline": 8, "sequence": True}
    yield Order(
        job="Llama 3.1 405B, 512 H100, 256 rows",
        runs=[
            Run(
                source="torchtitan",
                name=f"shard 8, tensor 8, pipeline 8, {schedule}",
                shape=llama,
                cluster=make_cluster(_titan_h100(), hosts=64, between=3200.0, inside="nvlink4"),
                sizes=Parallelism(**options, schedule=schedule, recompute=True),
                recipe=replace(COMPILED, hides=0.5),
                batch=batch,
                rows=4,
                recomputed=1.0,
                measured=measured,
            )
            for schedule, measured in (("interleaved-1f1b", 128), ("1f1b", 100))
        ],
        is_sorted=True,
    )
    large, small = _gpt("162B", 20480, 32, 128), _gpt("5.9B", 3840, 32, 32)
    for batch in (32, 128):
        divisions = [(8, 8), (4, 16), (16, 4), (2, 32), (32, 2)]
        yield _of_narayanan(
            large, batch, [{"pipeline": p, "tensor": t} for p, t in divisions], is_sorted=False
        )
    for kind, batches in (("pipeline", (32, 512)), ("tensor", (512,))):
        for batch in batches:
            sizes = [{kind: size, "data": 64 // size} for size in (2, 4, 8, 16, 32)]
            yield _of_narayanan(small, batch, sizes, is_sorted=True)


def _gpt(name: str, width: int, layers: int, heads: int) -> DecoderShape:
    return DecoderShape(
        vocabulary=51200,
        width=width,
        layers=layers,
        heads=heads,
        sequence=2048,
        is_tied=True,
        is_gated=False,
        has_biases=True,
        name=name,
    )


def _of_narayanan(
    shape: DecoderShape, batch: int, divisions: Sequence[dict[str, Any]], *, is_sorted: bool
) -> Order:
    return Order(
        job=f"GPT {shape.name}, 64 A100, {batch} rows, {' x '.join(divisions[0])}",
        runs=[
            Run(
                source="Narayanan 2021",
                name=", ".join(f"{kind} {size}" for kind, size in sizes.items()),
                shape=shape,
                cluster=make_cluster("a100", hosts=8, between=1600.0),
                sizes=Parallelism(**{"data": 1, **sizes}, recompute=True),
                recipe=MEGATRON_2021,
                batch=batch,
                rows=1,
            )
            for sizes in divisions
        ],
        is_sorted=is_sorted,
    )


def compare_orders() -> list[dict[str, Any]]:
    """Return a row for each run of :func:`orders`, in their order.

    Each has ``source``, ``job``, ``run``, ``measured`` and ``predicted``, both as a share of the job's fastest
    published run; ``measured`` is None where only the order is published.
    """
    rows: list[dict[str, Any]] = []
    for order in orders():
        first = order.runs[0]
        fastest = first.predict()
        rows += [
            {
                "source": run.source,
                "job": order.job,
                "run": run.name,
                "measured": run.measured / first.measured if run.measured and first.measured else None,
                "predicted": run.predict() / fastest,
            }
            for run in order.runs
        ]
    return rows
