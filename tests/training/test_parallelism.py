"""Fits whose ranks divide the module have the weights and the history of replicas on as many ranks as read rows."""

from __future__ import annotations

import dataclasses
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from sparkdl.data import Column, scan_dataset
from sparkdl.model.heads import Head, LabelColumn
from sparkdl.networks.decoder import Decoder, DecoderSizes
from sparkdl.parallel import Parallelism
from sparkdl.training.callbacks import Callback, FitContext
from sparkdl.training.spec import CheckpointPlan, Goal, TrainingSpec
from tests.run_ranks import run_ranks
from tests.training.scenes.training_scenes import (
    Outcome,
    assert_same_weights,
    make_model,
    make_spec,
    train_all,
    write_dataset,
)
from tests.training.signatures import make_inputs
from tests.training.test_validation import with_split

NUM_ROWS = 45  # some of them for validation; the last step is uneven
TOLERANCE = 1e-5  # float32, other order of sums

PARTS = {
    "shard": Parallelism(shard=4),
    "hybrid": Parallelism(data=2, shard=2),
    "tensor": Parallelism(tensor=2),
    "shard x tensor": Parallelism(shard=2, tensor=2, recompute=True, verify=True),
    "whole gradients": Parallelism(shard=4, sharding_stage=1),
    "pipeline": Parallelism(data=2, pipeline=2, stage_blocks=(2, 1)),
    "pipeline x shard": Parallelism(pipeline=2, shard=2, schedule="gpipe", recompute=True),
    "pipeline x tensor": Parallelism(pipeline=2, tensor=2, verify=True),
}
adamw = partial(torch.optim.AdamW, lr=0.05, eps=1e-3)
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {"batch_size": 4},
    "accumulated, clipped and weighted": {
        "accumulated_batches": 2,
        "max_grad_norm": 0.1,
        "weight": "w",
        "batch_size": 3,
    },
    "best epoch": {"best": Goal(metric="val_loss"), "epochs": 4, "optimizer": partial(adamw, lr=0.5)},
}


def with_plan(model: nn.Sequential) -> nn.Module:
    model.tensor_plan = {"0": "colwise", "2": "rowwise"}
    return model


def is_right(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.argmax(dim=1) == labels


def fits() -> dict[str, TrainingSpec]:
    return {
        name: make_spec(
            model=with_plan(make_model()), metrics={"right": is_right}, **{"optimizer": adamw, **changes}
        )
        for name, changes in CHANGES.items()
    }


def readers_of(parallelism: Parallelism) -> int:
    sizes = parallelism.resolve(4)
    return sizes.data * sizes.shard


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("rows"), NUM_ROWS)


ALL = [(name, fit) for name in PARTS for fit in CHANGES]
# Together they have each dimension, each schedule of shards and each kind of fit.
DAILY = [
    ("shard x tensor", "plain"),
    ("whole gradients", "accumulated, clipped and weighted"),
    ("pipeline", "best epoch"),
    ("pipeline x tensor", "accumulated, clipped and weighted"),
]


@pytest.fixture(scope="module")
def chosen(request):
    """The fits that are among the collected tests of this run."""
    mine = {item.callspec.id for item in request.session.items if item.originalname == NAME_OF_TEST}
    return [(name, fit) for name, fit in ALL if f"{name}-{fit}" in mine]


@pytest.fixture(scope="module")
def replicas(rows, chosen):
    """The outcomes of the same fits with replicas, on as many ranks as read rows."""
    found = {}
    needed = {(readers_of(PARTS[name]), fit) for name, fit in chosen}
    for ranks in sorted({ranks for ranks, _ in needed}):
        mine = [fit for fit in CHANGES if (ranks, fit) in needed]
        cases = [(with_split(fits()[fit], rows, 0.2), rows) for fit in mine]
        found[ranks] = dict(zip(mine, run_ranks(ranks, train_all, cases)[0], strict=True))
    return found


@pytest.fixture(scope="module")
def parts(rows, chosen):
    """The outcomes of those fits."""
    cases = [
        (dataclasses.replace(with_split(fits()[fit], rows, 0.2), parallelism=PARTS[name]), rows)
        for name, fit in chosen
    ]
    outcomes = run_ranks(4, train_all, cases)
    assert not any(outcome.weights for rank in outcomes[1:] for outcome in rank)
    return dict(zip(chosen, outcomes[0], strict=True))


@pytest.mark.parametrize(
    ("name", "fit"),
    [pytest.param(*case, marks=() if case in DAILY else pytest.mark.slow) for case in ALL],
)
def test_ranks_with_parts_compute_what_replicas_do(parts, replicas, name, fit):
    found, expected = parts[name, fit], replicas[readers_of(PARTS[name])][fit]
    assert_same_fit(found, expected)


def assert_same_fit(found: Outcome, expected: Outcome) -> None:
    assert_same_weights(found.weights, expected.weights, rtol=TOLERANCE, atol=TOLERANCE)
    for one, other in zip(found.history, expected.history, strict=True):
        assert (one.epoch, one.rows) == (other.epoch, other.rows)
        assert one.loss == pytest.approx(other.loss, rel=TOLERANCE)
        assert one.metrics == pytest.approx(other.metrics, rel=TOLERANCE)
    assert found.model_epoch == expected.model_epoch


NAME_OF_TEST = test_ranks_with_parts_compute_what_replicas_do.__name__


@pytest.fixture(scope="module")
def on_two_ranks(rows):
    norms = make_spec(model=make_model(norm=True), sync_batch_norm=True, batch_size=4, optimizer=adamw)
    specs = {
        "plain": fits()["plain"],
        "recomputed": dataclasses.replace(fits()["plain"], parallelism=Parallelism(data=2, recompute=True)),
        "norms of replicas": norms,
        "norms of shards": dataclasses.replace(
            norms, model=make_model(norm=True), parallelism=Parallelism(shard=2)
        ),
        "norms apart": dataclasses.replace(norms, model=make_model(norm=True), sync_batch_norm=False),
    }
    outcomes = run_ranks(2, train_all, [(spec, rows) for spec in specs.values()])[0]
    return dict(zip(specs, outcomes, strict=True))


def test_recomputed_activations_change_no_bit_and_a_plain_module_is_returned(on_two_ranks):
    plain, found = on_two_ranks["plain"], on_two_ranks["recomputed"]
    assert [record.loss for record in found.history] == [record.loss for record in plain.history]
    assert_same_weights(found.weights, plain.weights)


def test_batch_norms_of_a_sharded_module_are_synchronized(on_two_ranks):
    replicas, apart = (on_two_ranks[name].weights for name in ("norms of replicas", "norms apart"))
    assert_same_weights(on_two_ranks["norms of shards"].weights, replicas, rtol=1e-4, atol=1e-6)
    assert any(not np.allclose(apart[name], weight, rtol=1e-3) for name, weight in replicas.items())


def next_token_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def small_decoder() -> Decoder:
    torch.manual_seed(3)
    return Decoder(DecoderSizes(vocabulary=32, width=16, layers=4, heads=2))


SHARED_SEQUENCES = {
    "contexts of shards and a pipeline of replicas": [
        Parallelism(shard=2, context=2, verify=True),
        Parallelism(pipeline=2, data=2, schedule="zbv"),
    ],
    "contexts of replicas and a pipeline of divided sequences": [
        Parallelism(context=2, data=2, attention="all-to-all"),
        Parallelism(pipeline=2, tensor=2, sequence=True, schedule="interleaved-1f1b"),
    ],
    "others": [
        Parallelism(data=2, tensor=2, sequence=True),
        Parallelism(data=1, tensor=2, context=2),
        Parallelism(pipeline=2, context=2),
        Parallelism(pipeline=2, shard=2),
    ],
}


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(name, marks=pytest.mark.slow if number else ())
        for number, name in enumerate(SHARED_SEQUENCES)
    ],
)
def test_sequences_that_ranks_share_are_learned_as_whole_ones(tmp_path, layouts):
    rng = np.random.default_rng(0)
    tokens = (np.arange(17) * rng.integers(1, 4, size=(21, 1)) + rng.integers(0, 32, size=(21, 1))) % 32

    def column(values):
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1).astype(np.int64)), 16)

    table = pa.table({"x": column(tokens[:, :-1]), "y": column(tokens[:, 1:])})
    pq.write_table(table, tmp_path / "part-0.parquet", row_group_size=5)
    dataset = scan_dataset(str(tmp_path))
    spec = dataclasses.replace(
        make_spec(model=small_decoder(), batch_size=4, optimizer=adamw, max_grad_norm=0.5),
        inputs=make_inputs("x", x=Column(name="x", dtype="int64", shape=(16,)), dtypes=("int64",)),
        heads=(Head(label=LabelColumn(name="y", dtype="int64", shape=(16,)), loss=next_token_loss),),
    )
    cases = [
        (dataclasses.replace(spec, model=small_decoder(), parallelism=sizes), dataset)
        for sizes in SHARED_SEQUENCES[layouts]
    ]
    (found, *_) = run_ranks(4, train_all, cases)
    readers = {readers_of(sizes) for sizes in SHARED_SEQUENCES[layouts]}
    expected = {ranks: run_ranks(ranks, train_all, [(spec, dataset)])[0][0] for ranks in readers}
    for layout, outcome in zip(SHARED_SEQUENCES[layouts], found, strict=True):
        other = expected[readers_of(layout)]
        assert outcome.history[-1].loss == pytest.approx(other.history[-1].loss, rel=TOLERANCE), layout
        assert_same_weights(outcome.weights, other.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("all_pairs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fit_resumes_in_every_other_layout(tmp_path, rows, all_pairs):
    """Resumes in the middle of an epoch; the optimizer, the metrics and the best weights so far are restored, too.

    By default each of three layouts resumes in one other layout; the slow test covers every pair of six.
    """
    spec = dataclasses.replace(
        with_split(fits()["best epoch"], rows, 0.2), batch_size=2, metrics={"right": is_right}
    )

    def case(parallelism: Parallelism | None, folder: str, **changes: Any) -> tuple[TrainingSpec, Any]:
        plan = CheckpointPlan(url=str(tmp_path / folder), every_updates=2, num_kept=100)
        model = with_plan(make_model())
        return dataclasses.replace(
            spec, model=model, parallelism=parallelism, checkpoints=plan, **changes
        ), rows

    names = (
        ("shard", "hybrid", "pipeline", "tensor", "pipeline x tensor") if all_pairs else ("shard", "pipeline")
    )
    layouts = [None, *(PARTS[name] for name in names)]
    whole = run_ranks(4, train_all, [case(sizes, f"{number}") for number, sizes in enumerate(layouts)])[0]
    pairs = [
        (one, other)
        for one, _ in enumerate(layouts)
        for other, _ in enumerate(layouts)
        if all_pairs or other == (one + 1) % len(layouts)
    ]
    resumed = []
    for number, other in pairs:
        names = [path.name for path in (tmp_path / f"{number}").glob("*-epoch-00003-step-00000002-*")]
        folder = f"{number} to {other}"
        shutil.copytree(tmp_path / f"{number}" / names[0], tmp_path / folder / names[0])
        resumed.append(case(layouts[other], folder))
    outcomes = run_ranks(4, train_all, resumed)[0]
    for (number, other), outcome in zip(pairs, outcomes, strict=True):
        print(f"{layouts[number]} to {layouts[other]}")
        assert [record.epoch for record in outcome.history] == [1, 2, 3, 4]
        assert_same_fit(outcome, whole[number])


class Peak(nn.Module):
    """Keeps the largest input that it has seen, in a buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("peak", torch.zeros(()), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        self.peak = torch.maximum(self.peak, values.detach().abs().max())
        return values


class PeakAtStart(Callback):
    """Writes the largest input that the module had seen when the fit began."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_fit_start(self, context: FitContext) -> None:
        peaks = [buffer.item() for name, buffer in context.module.named_buffers() if name.endswith("peak")]
        if peaks:
            self.file.with_name(f"{self.file.name}-{context.rank}").write_text(str(peaks[0]))


def test_buffers_of_later_stages_are_kept_when_a_fit_resumes_without_a_pipeline(tmp_path, rows):
    plan = CheckpointPlan(url=str(tmp_path / "checkpoints"), every_updates=None, num_kept=2)

    def case(epochs: int, parallelism: Parallelism | None, name: str) -> tuple[TrainingSpec, Any]:
        model = nn.Sequential(*make_model(), Peak())
        spec = make_spec(model=model, batch_size=4, epochs=epochs, optimizer=adamw)
        return dataclasses.replace(
            spec, parallelism=parallelism, checkpoints=plan, callbacks=(PeakAtStart(tmp_path / name),)
        ), rows

    run_ranks(2, train_all, [case(1, Parallelism(pipeline=2), "first"), case(2, None, "second")])
    assert (tmp_path / "first-1").read_text() == "0.0"
    resumed = [float((tmp_path / f"second-{rank}").read_text()) for rank in (0, 1)]
    assert resumed[0] == resumed[1] > 0


class ZeroAtTheEnd(Callback):
    def on_epoch_end(self, context: FitContext) -> None:
        with torch.no_grad():
            for parameter in context.module.parameters():
                parameter.zero_()


def test_callbacks_change_the_weights_of_sharded_models_after_validation(rows):
    def case(stage: int) -> tuple[TrainingSpec, Any]:
        spec = make_spec(model=make_model(), batch_size=4, epochs=1, callbacks=(ZeroAtTheEnd(),))
        parallelism = Parallelism(shard=2, sharding_stage=stage)
        return with_split(dataclasses.replace(spec, parallelism=parallelism), rows, 0.2), rows

    for outcome in run_ranks(2, train_all, [case(stage) for stage in (1, 2, 3)])[0]:
        assert not any(weights.any() for weights in outcome.weights.values())


def test_checkpoints_consist_of_parts_and_one_that_is_incomplete_or_changed_is_skipped(tmp_path, rows):
    def case(folder: Path) -> tuple[TrainingSpec, Any]:
        return dataclasses.replace(
            make_spec(model=with_plan(make_model()), optimizer=adamw, batch_size=4, epochs=3),
            parallelism=PARTS["shard x tensor"],
            checkpoints=CheckpointPlan(url=str(folder), every_updates=None, num_kept=100),
        ), rows

    whole, lost, changed = (tmp_path / name for name in ("whole", "lost", "changed"))
    (expected,) = run_ranks(4, train_all, [case(whole)])[0]
    *_, last = folders = sorted(whole.glob("fit-*"))
    assert len(folders) == 3
    for folder in folders:
        assert [path.name for path in folder.glob("*.pt")] == ["rank-00000.pt"]
        assert len(list(folder.glob("rank-*.safetensors"))) == 4
    for copy in (lost, changed):
        shutil.copytree(whole, copy)
        part = copy / last.name / "rank-00002.safetensors"
        part.unlink() if copy is lost else part.write_bytes(part.read_bytes()[:-1] + b"?")
    for outcome in run_ranks(4, train_all, [case(lost), case(changed)])[0]:
        assert [event["epoch"] for event in outcome.events if event["kind"] == "resumed"] == [3]
        assert_same_weights(outcome.weights, expected.weights)
