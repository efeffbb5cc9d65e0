"""Which fits may resume from the checkpoints of a fit, and the errors of the others."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torchmetrics.classification import BinaryAccuracy

from sparkdl.data import RowGroup, scan_dataset
from sparkdl.data.dataset.row_choice import RowFilter
from sparkdl.errors import CheckpointError, StoreError
from sparkdl.model.inputs import ModelInput
from sparkdl.training.callbacks import Callback, Patience
from sparkdl.training.checkpoint.identity import check_identity, fit_identity, model_files_identity
from sparkdl.training.spec import DRAWN, Goal
from tests.training.scenes.training_scenes import make_model, make_spec, write_dataset


def halve(columns: Any) -> Any:
    return columns


def in_two_groups(rate: float) -> Any:
    def make(parameters: Any) -> torch.optim.Optimizer:
        weight, bias, *others = parameters
        groups = [{"params": [weight, bias], "lr": rate}, {"params": others}]
        return torch.optim.SGD(groups, lr=0.1)

    return make


def reversed_parameters(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters)[::-1], lr=0.1, momentum=0.9)


def with_inputs(**changes: Any) -> dict[str, Any]:
    return {"inputs": replace(make_spec().inputs, **changes)}


def with_classes(*classes: str) -> dict[str, Any]:
    (head,) = make_spec().heads
    return {"heads": (replace(head, label=replace(head.label, classes=classes)),)}


def stepwise(gamma: float) -> Any:
    return partial(scheduler_of, gamma=gamma)


def scheduler_of(optimizer: torch.optim.Optimizer, steps: int, gamma: float) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, steps, gamma)


def right(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == labels).float()


def wrong(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 1 - right(outputs, labels)


BY_LOSS, BY_RIGHT = Goal(metric="val_loss"), Goal(metric="val_right", mode="max")
RIGHTLY = {"best": BY_RIGHT, "metrics": {"right": right}}


def accuracy(threshold: float) -> dict[str, Any]:
    return {"best": BY_RIGHT, "metrics": {"right": BinaryAccuracy(threshold=threshold)}}


STOPPING = {"patience": Patience(epochs=2), "watched": BY_LOSS}

CHANGES = [
    ({}, {"model": make_model(5)}, "2.weight was 'float32 .3, 8.' and is 'float32 .5, 8.'"),
    (
        {},
        {"model": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))},
        r"1 was 'Tanh\(\)' and is 'ReLU",
    ),
    (
        {"model": nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1))},
        {"model": nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.2))},
        r"1 was 'Dropout\(inplace=False, p=0.1\)' and is 'Dropout\(inplace=False, p=0.2\)",
    ),
    ({}, {"batch_size": 4}, "batchSize was 8 and is 4"),
    (
        {},
        {"optimizer": partial(torch.optim.SGD, lr=0.2, momentum=0.9)},
        "optimizer was .*lr=0.1.* and is .*lr=0.2",
    ),
    ({}, {"optimizer": torch.optim.Adam}, "optimizer was 'SGD.* and is 'Adam"),
    (
        {"optimizer": in_two_groups(0.1)},
        {"optimizer": in_two_groups(0.2)},
        r"optimizer was .*lr=0.1.*; .*lr=0.1.* and is .*lr=0.2.*; .*lr=0.1",
    ),
    ({}, {"optimizer": reversed_parameters}, "changed: parameters of the optimizer"),
    ({}, {"loss": nn.MultiMarginLoss()}, "loss was .CrossEntropyLoss.* and is .MultiMarginLoss"),
    ({"loss": nn.HuberLoss()}, {"loss": nn.HuberLoss(delta=2.0)}, "loss was .*=1.0.* and is .*delta=2.0"),
    (
        {},
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
        "loss was .*=0.0.* and is .*label_smoothing=0.1",
    ),
    (
        {"loss": nn.CrossEntropyLoss(torch.tensor([1.0, 1.0, 1.0]))},
        {"loss": nn.CrossEntropyLoss(torch.tensor([1.0, 1.0, 2.0]))},
        r"loss was .*weight=\(3,\) .* and is .*weight=\(3,\)",
    ),
    ({}, {"seed": 8}, "seed was 7 and is 8"),
    ({}, {"accumulated_batches": 2}, "gradientAccumulationSteps was 1 and is 2"),
    ({}, {"weight": "w"}, "weightCol was not there and is 'w'"),
    ({}, {"max_grad_norm": 1.0}, "maxGradNorm was not there and is 1.0"),
    ({}, {"scheduler": stepwise(0.1)}, "scheduler was not there and is 'scheduler_of"),
    ({"scheduler": stepwise(0.1)}, {"scheduler": stepwise(0.2)}, "scheduler was .*=0.1.* and is .*gamma=0.2"),
    (
        {"scheduler": stepwise(0.1)},
        {"scheduler": stepwise(0.1), "epochs": 3},
        "scheduler was .* 2 epochs. .* 3 epochs",
    ),
    ({}, with_inputs(prepare=halve), "prepareFeatures was not there and is 'halve'"),
    ({}, with_inputs(given_by="name"), "passFeaturesBy was 'position' and is 'name'"),
    (with_inputs(padding_value=0.0), with_inputs(padding_value=-1.0), "paddingValue was '0.0' and is '-1.0'"),
    (
        {},
        with_inputs(inputs=(ModelInput(name="x", dtype="float64"),)),
        "inputs .* was .*float32.* and is .*float64",
    ),
    (with_classes("a", "b", "c"), with_classes("a", "b", "d"), "labels 'y' was .*'a', 'b', 'c'"),
    ({}, {"augment": halve}, "augment was not there and is 'halve'"),
    ({"augment": halve}, {"augment": right}, "augment was 'halve' and is 'right'"),
    ({}, {"user_step": halve}, "trainStep was not there and is 'halve'"),
    ({"user_step": halve}, {"user_step": right}, "trainStep was 'halve' and is 'right'"),
    ({"best": BY_LOSS}, RIGHTLY, "bestMetric was 'val_loss' and is 'val_right'; bestMode was 'min' and is"),
    (RIGHTLY, {**RIGHTLY, "best": replace(BY_RIGHT, mode="min")}, "bestMode was 'max' and is 'min'"),
    (RIGHTLY, {**RIGHTLY, "metrics": {"right": wrong}}, "metric 'right' was 'right' and is 'wrong'"),
    (accuracy(0.5), accuracy(0.6), "metric 'right' was .*threshold=0.5.* and is .*threshold=0.6"),
    (STOPPING, {**STOPPING, "patience": Patience(epochs=3)}, "earlyStoppingPatience was 2 and is 3"),
    (STOPPING, {**STOPPING, "watched": Goal(metric="loss")}, "by was 'val_loss, min' and is 'loss, min'"),
    (
        {},
        {"training_rows": RowFilter("validates", halve, (1,) * 7)},
        "rows .* was 'all' and is '7 in .* by validates'",
    ),
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), 33)


def stored(identity: dict[str, Any]) -> dict[str, Any]:
    """An identity as it is read from a checkpoint."""
    return json.loads(json.dumps(identity))


@pytest.mark.parametrize(("before", "after", "said"), CHANGES)
def test_checkpoints_of_another_fit_are_an_error_that_says_what_differs(dataset, before, after, said):
    then, now = (fit_identity(make_spec(**changes), dataset) for changes in (before, after))
    check_identity(stored(then), then, "/there")
    with pytest.raises(CheckpointError, match=f"/there holds checkpoints of another fit: .*{said}"):
        check_identity(stored(then), now, "/there")
    with pytest.raises(CheckpointError, match="/there holds checkpoints of another fit: "):
        check_identity(stored(now), then, "/there")


class CountingLoss(nn.Module):
    """A user's loss that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))


def test_settings_that_do_not_affect_the_numbers_may_differ(dataset):
    then = fit_identity(make_spec(metrics={"right": right}, loss=CountingLoss()), dataset)
    called = CountingLoss()
    called.calls, called.seen = 7, torch.ones(())
    changes = {
        "loss": called,
        "metrics": {"wrong": wrong},
        "epochs": 9,
        "cache": "memory",
        "callbacks": (Callback(),),
        "watched": BY_RIGHT,  # ignored without patience
        "validation_rows": RowFilter("never", halve, (0,)),
    }
    check_identity(then, fit_identity(make_spec(**changes), dataset), "/there")


def test_every_field_of_a_fit_is_compared_or_known_to_change_nothing(dataset):
    """A new field whose value is not plain raises an AssertionError, so that it cannot be forgotten."""
    names = {"deterministic", "precision", "shuffle", "syncBatchNorm", "learningRateScaling"}
    assert names <= fit_identity(make_spec(), dataset).keys()
    with pytest.raises(AssertionError, match="batch_size has to be described"):
        fit_identity(make_spec(batch_size=object()), dataset)


FILES = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"words"}


def folder_of(path, **changes):
    path.mkdir()
    for name, content in {**FILES, **changes}.items():
        if content is not None:
            (path / name).write_bytes(content)
    return {"initial_weights": str(path), "initial_files": model_files_identity(str(path))}


def test_checkpoints_of_a_fit_that_began_with_other_files_are_an_error(dataset, tmp_path):
    then = fit_identity(make_spec(**folder_of(tmp_path / "first")), dataset)
    moved = folder_of(tmp_path / "moved", **{"README.md": b"notes", "log.json": b"{}"})
    check_identity(then, fit_identity(make_spec(**moved), dataset), "/there")
    changes = {
        "the initial weights: model.safetensors was '7 bytes #.*' and is '7 bytes #.*'. Choose": {
            "model.safetensors": b"WEIGHTS"
        },
        "config.json was .* and is not there; .*tokenizer.json was .*; .*merges.txt was not there": {
            "config.json": None,
            "merges.txt": b"",
            "tokenizer.json": b"",
        },
        "config.json was .*model.safetensors was .*tokenizer.json was .*model-1.*model-2.*; 1 more": {
            "config.json": b"",
            "model.safetensors": None,
            "tokenizer.json": None,
            **{f"model-{number}.safetensors": b"" for number in (1, 2, 3)},
        },
    }
    for number, (said, change) in enumerate(changes.items()):
        now = fit_identity(make_spec(**folder_of(tmp_path / str(number), **change)), dataset)
        with pytest.raises(CheckpointError, match=f"/there holds checkpoints of another fit: .*{said}"):
            check_identity(stored(then), now, "/there")
    drawn = fit_identity(make_spec(initial_weights=DRAWN), dataset)
    with pytest.raises(CheckpointError, match="the initial weights was {.*} and is 'drawn'"):
        check_identity(then, drawn, "/there")
    with pytest.raises(CheckpointError, match="the initial weights was 'drawn' and is {"):
        check_identity(drawn, then, "/there")


def test_own_weights_of_a_module_are_not_compared(dataset, tmp_path):
    of_folder = fit_identity(make_spec(**folder_of(tmp_path / "first")), dataset)
    drawn = fit_identity(make_spec(initial_weights=DRAWN), dataset)
    own = fit_identity(make_spec(), dataset)
    for then, now in ((own, of_folder), (of_folder, own), (drawn, own)):
        check_identity(then, now, "/there")


def test_blocks_of_large_files_of_weights_are_compared(tmp_path):
    """The first and the last bytes are among the blocks, and no two blocks are further apart than the others."""
    path, size = tmp_path / "model.safetensors", (64 << 20) + 4096

    def identity_with(start=0, content=b"", length=size):
        with path.open("wb") as file:
            file.truncate(length)
            file.seek(start)
            file.write(content)
        return model_files_identity(str(tmp_path))

    before = identity_with()
    assert before == model_files_identity(str(path))
    assert before != identity_with(0, b"\1")
    assert before != identity_with(size // 2, b"\1" * (size // 255))  # as long as from block to block
    assert before != identity_with(size - 1, b"\1")
    assert before != identity_with(length=size + 1)


def test_files_of_weights_are_found_through_links(tmp_path):
    """The cache of the Hugging Face hub holds links to its files."""
    folder_of(tmp_path / "first")
    (tmp_path / "linked").mkdir()
    for name in FILES:
        (tmp_path / "linked" / name).symlink_to(tmp_path / "first" / name)
    assert model_files_identity(str(tmp_path / "linked")) == model_files_identity(str(tmp_path / "first"))


def test_missing_folder_of_initial_weights_is_an_error(tmp_path):
    with pytest.raises(StoreError, match="The initial weights in .*nowhere cannot be read"):
        model_files_identity(str(tmp_path / "nowhere"))


def test_checkpoints_of_another_dataset_are_an_error(dataset, tmp_path):
    then = fit_identity(make_spec(), dataset)
    others = {"number of rows was 33 and is 34": write_dataset(tmp_path / "longer", 34)}
    others["row groups; "] = write_dataset(tmp_path / "cut", 33, rows_per_group=7)
    for said, other in others.items():
        with pytest.raises(CheckpointError, match=f"the dataset's {said}"):
            check_identity(then, fit_identity(make_spec(), other), "/there")
    same = write_dataset(tmp_path / "copied", 33)
    os.rename(tmp_path / "copied" / "part-0.parquet", tmp_path / "copied" / "part-1.parquet")
    check_identity(then, fit_identity(make_spec(), scan_dataset(same.url)), "/there")
    with pytest.raises(CheckpointError, match="column 'y' was .* and is not there"):
        check_identity(then, fit_identity(make_spec(label="target"), dataset), "/there")


def written(table, folder):
    folder.mkdir()
    pq.write_table(table, folder / "part-0.parquet", row_group_size=40)
    return scan_dataset(str(folder))


def exchanged(table, name):
    """Exchange two values of a column after the first 64 rows, which leaves the statistics of the column unchanged."""
    values = table[name].to_pylist()
    other = next(number for number in range(64, 99) if values[number] != values[-1])
    values[other], values[-1] = values[-1], values[other]
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.field(name), pa.array(values, table.field(name).type))


def test_all_rows_of_a_small_dataset_are_compared_in_their_order(tmp_path):
    rows = write_dataset(tmp_path / "numbers", 100)
    table = pq.read_table(tmp_path / "numbers")
    table = table.append_column("text", pa.array([f"row {number}" for number in range(100)]))
    dataset = written(table, tmp_path / "with texts")
    spec = make_spec()
    spec = replace(spec, inputs=replace(spec.inputs, columns=(rows.column("x"), dataset.column("text"))))
    then = fit_identity(spec, dataset)
    turned = written(table.take([*range(64), *reversed(range(64, 100))]), tmp_path / "turned")
    with pytest.raises(CheckpointError, match="changed: the dataset's rows"):
        check_identity(then, fit_identity(spec, turned), "/there")
    for name in ("x", "y", "text"):
        now = fit_identity(spec, written(exchanged(table, name), tmp_path / name))
        with pytest.raises(CheckpointError, match="another fit: changed: the dataset's rows. Choose"):
            check_identity(then, now, "/there")


def test_only_the_first_rows_of_a_large_dataset_are_compared(tmp_path):
    def large(folder, rows):
        unread = RowGroup(path="nowhere.parquet", index=0, num_rows=(64 << 20) // (4 * 4 + 8))
        dataset = written(table.take(list(rows)), tmp_path / folder)
        return fit_identity(make_spec(), replace(dataset, row_groups=(*dataset.row_groups, unread)))

    write_dataset(tmp_path / "rows", 100)
    table = pq.read_table(tmp_path / "rows")
    then = large("then", range(100))
    check_identity(then, large("same", [*range(64), *reversed(range(64, 100))]), "/there")
    with pytest.raises(CheckpointError, match="changed: the dataset's rows"):
        check_identity(then, large("turned", [*reversed(range(64)), *range(64, 100)]), "/there")
