"""Checkpoints as files: which one a fit goes on from, which ones stay, and what is said of those that are damaged."""

from __future__ import annotations

import json
import logging
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.data import scan_dataset
from sparkdl.errors import CheckpointError, StoreError
from sparkdl.training.checkpoint import FILES, FORMAT_VERSION, MANIFEST, Content, Manifest
from sparkdl.training.checkpoint_choice import choose_checkpoint
from sparkdl.training.checkpoint_files import load_file
from sparkdl.training.checkpoint_folder import CheckpointFolder
from sparkdl.training.checkpoint_writer import CheckpointWriter
from sparkdl.training.fit_identity import check_identity, fit_identity
from sparkdl.training.host_copy import copy_to_host
from tests.training.training_scenes import make_model, make_spec, write_dataset

IDENTITY: dict[str, Any] = {"tensors": {}, "dataset": {}, "settings": {}}


def make_content(epoch: int, step: int = 4) -> Content:
    manifest = Manifest(
        epoch=epoch,
        step=step,
        ends_epoch=True,
        finished=False,
        epochs=9,
        world_size=1,
        num_ranks_at_start=1,
        identity=IDENTITY,
    )
    states = {name: {"place": (epoch, step), "values": torch.arange(1000.0)} for name in FILES}
    return Content(manifest=manifest, states=states)


def write(folder: CheckpointFolder, *epochs: int) -> list[Path]:
    return [Path(folder.url, folder.write(make_content(epoch))) for epoch in epochs]


def chosen_epoch(folder: CheckpointFolder) -> int | None:
    _, manifest, _ = choose_checkpoint(folder, IDENTITY, epochs=9)
    return None if manifest is None else manifest.epoch


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(str(tmp_path / "checkpoints"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


DAMAGES = {
    "a file was cut": (lambda path: cut(path / "optimizer.pt"), "optimizer.pt has .* bytes instead of"),
    "a bit flipped": (lambda path: flip_a_bit(path / "ranks.pt"), "ranks.pt does not match its checksum"),
    "a file is missing": (lambda path: (path / "model.pt").unlink(), "model.pt is missing"),
    "it was half written": (lambda path: (path / MANIFEST).unlink(), "not written to its end"),
    "its manifest was cut": (lambda path: cut_half(path / MANIFEST), f"its {MANIFEST} is damaged"),
}


def cut_half(path: Path) -> None:
    path.write_text(path.read_text()[:100])


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_used_and_that_is_said(folder, caplog, damage):
    _, _, newest = write(folder, 1, 2, 3)
    spoil, said = DAMAGES[damage]
    assert chosen_epoch(folder) == 3
    spoil(newest)
    with caplog.at_level(logging.WARNING):
        assert chosen_epoch(folder) == 2
    (record,) = caplog.records
    assert re.search(rf"{newest.name} is not used: .*{said}.*The one before it is", record.getMessage())


def test_a_fit_starts_anew_where_no_checkpoint_is_whole_and_says_so(folder, caplog):
    (path,) = write(folder, 1)
    cut(path / "fit.pt")
    with caplog.at_level(logging.WARNING):
        assert chosen_epoch(folder) is None
    assert "the fit starts from the beginning" in caplog.text
    assert chosen_epoch(CheckpointFolder(folder.url + "-empty")) is None


def test_what_was_written_is_read_back(folder):
    name = folder.write(make_content(2))
    for file in FILES:
        state = load_file(folder.location(name), file)
        assert state["place"] == (2, 4)
        assert torch.equal(state["values"], torch.arange(1000.0))


def test_the_last_ones_and_the_best_are_kept_and_damaged_and_half_written_ones_go(folder):
    half, damaged = write(folder, 1, 2)
    (half / MANIFEST).unlink()
    cut(damaged / "fit.pt")
    writer = CheckpointWriter(folder, num_kept=2, damaged=[damaged.name])
    for epoch in (3, 4, 5, 6):
        writer.write(make_content(epoch), is_best=epoch == 4)
    writer.close(failed=False)
    assert [folder.manifest(name).epoch for name in folder.names()] == [4, 5, 6]
    assert folder.manifest(str(folder.best())).epoch == 4
    writer = CheckpointWriter(folder, num_kept=1)
    writer.write(make_content(7), is_best=True)
    writer.close(failed=False)
    assert [folder.manifest(name).epoch for name in folder.names()] == [7]


def test_a_failing_write_is_an_error_with_path_and_remedy(folder, tmp_path):
    Path(folder.url).write_text("a file where the folder should be")
    writer = CheckpointWriter(folder, num_kept=2)
    writer.write(make_content(1))
    with pytest.raises(
        StoreError, match=r"checkpoints/epoch-00001.* cannot be written.*Choose a checkpointDir"
    ):
        writer.write(make_content(2))
    writer.close(failed=True)


def test_the_best_one_that_cannot_be_marked_is_an_error_with_its_path(folder):
    Path(folder.url, "best.json.tmp").mkdir(parents=True)
    writer = CheckpointWriter(folder, num_kept=2)
    writer.write(make_content(1), is_best=True)
    with pytest.raises(
        StoreError, match=r"best.json, which names the best checkpoint, cannot be written: IsADir"
    ):
        writer.close(failed=False)


def test_a_checkpoint_is_written_also_where_old_ones_cannot_be_removed_and_that_is_said(folder, caplog):
    Path(folder.url, "best.json").mkdir(parents=True)  # it cannot be known which one is the best
    writer = CheckpointWriter(folder, num_kept=1)
    for epoch in (1, 2):
        writer.write(make_content(epoch))
    with caplog.at_level(logging.WARNING):
        writer.close(failed=False)
    assert [folder.manifest(name).epoch for name in folder.names()] == [1, 2]
    assert "no longer kept could not be removed: " in caplog.text
    assert "best.json cannot be read: IsADirectoryError" in caplog.text


def test_a_checkpoint_of_a_newer_version_is_an_error(folder):
    (path,) = write(folder, 1)
    content = json.loads((path / MANIFEST).read_text())
    content["format_version"] = FORMAT_VERSION + 1
    (path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"format 2 by sparkdl .*Install a newer sparkdl"):
        chosen_epoch(folder)


def test_a_fit_of_fewer_epochs_is_an_error(folder):
    write(folder, 3)
    with pytest.raises(CheckpointError, match="come to the end of epoch 3, and epochs is 2. Raise epochs"):
        choose_checkpoint(folder, IDENTITY, epochs=2)


CHANGES = {
    "another layer": (
        {"model": make_model(5)},
        "the model's 2.weight was float32 .3, 8. and is float32 .5, 8.",
    ),
    "another batch size": ({"batch_size": 4}, "batchSize was 8 and is 4"),
    "another learning rate": (
        {"optimizer": partial(torch.optim.SGD, lr=0.2, momentum=0.9)},
        r"optimizer was 'SGD\(.*lr=0.1.* and is 'SGD\(.*lr=0.2",
    ),
    "another optimizer": ({"optimizer": torch.optim.Adam}, "optimizer was 'SGD.* and is 'Adam"),
    "another loss": ({"loss": nn.MultiMarginLoss()}, "loss was 'CrossEntropyLoss' and is 'MultiMarginLoss'"),
    "another seed": ({"seed": 8}, "seed was 7 and is 8"),
    "accumulation": ({"accumulated_batches": 2}, "gradientAccumulationSteps was 1 and is 2"),
    "weighted rows": ({"weight": "w"}, "weightCol was None and is 'w'"),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), 33)


@pytest.mark.parametrize("change", CHANGES)
def test_checkpoints_of_another_fit_are_an_error_that_says_what_differs(dataset, change):
    changes, said = CHANGES[change]
    then = json.loads(json.dumps(fit_identity(make_spec(), dataset)))
    check_identity(then, fit_identity(make_spec(), dataset), "/there")
    now = fit_identity(make_spec(**changes), dataset)
    with pytest.raises(CheckpointError, match=f"/there holds checkpoints of another fit: .*{said}"):
        check_identity(then, now, "/there")


def test_checkpoints_of_another_dataset_are_an_error(dataset, tmp_path):
    then = fit_identity(make_spec(), dataset)
    others = {"number of rows was 33 and is 34": write_dataset(tmp_path / "longer", 34)}
    others["row groups were others"] = write_dataset(tmp_path / "cut", 33, rows_per_group=7)
    for said, other in others.items():
        with pytest.raises(CheckpointError, match=f"the dataset's {said}"):
            check_identity(then, fit_identity(make_spec(), other), "/there")
    same = write_dataset(tmp_path / "copied", 33)
    os.rename(tmp_path / "copied" / "part-0.parquet", tmp_path / "copied" / "part-1.parquet")
    check_identity(then, fit_identity(make_spec(), scan_dataset(same.url)), "/there")
    with pytest.raises(CheckpointError, match="column 'y' is not there"):
        check_identity(then, fit_identity(make_spec(label="target"), dataset), "/there")


def test_what_no_checkpoint_can_hold_is_named_when_it_is_written():
    shared = torch.ones(3)
    copied = copy_to_host({"a": shared, "b": [shared, (1, {2.0}, None)]}, "the state")
    assert copied["a"] is copied["b"][0]
    assert copied["a"].data_ptr() != shared.data_ptr()
    with pytest.raises(CheckpointError, match=r"the state\['a'\]\[1\] is a .*Path, and a state may hold"):
        copy_to_host({"a": [1, Path("x")]}, "the state")
