"""Checkpoints in a folder: which one a fit resumes from, which ones are kept, and the warnings about damaged ones."""

from __future__ import annotations

import logging
import re
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from sparkdl.checkpoint.folder import MANIFEST, Checkpoint, CheckpointFolder
from sparkdl.checkpoint.tensors import Content, write_checkpoint
from sparkdl.checkpoint.values import copy_to_host
from sparkdl.checkpoint.writer import CheckpointWriter
from sparkdl.data.files.lease import hold_alone
from sparkdl.errors import CheckpointError, CheckpointsInUseError, StoreError
from sparkdl.training.checkpoint.fit_manifest import FitManifest, fit_folder
from sparkdl.training.checkpoint.identity import check_progress

IDENTITY: dict[str, Any] = {"tensors": {}, "dataset": {}, "initial weights": {}, "settings": {}}
TENSORS, STATE = "rank-00000.safetensors", "rank-00000.pt"


def make_content(epoch: int, **changes: Any) -> Content:
    manifest = FitManifest(
        epoch=epoch,
        step=4,
        ends_epoch=True,
        finished=False,
        epochs=9,
        layout="1 replicas",
        num_ranks_at_start=1,
        identity=IDENTITY,
    )
    return Content(
        label=f"epoch-{epoch:05d}-step-00000004",
        tensors={"model/values": torch.arange(1000.0)},
        state={"place": (epoch, 4)},
        about=asdict(manifest),
        **changes,
    )


def write(folder: CheckpointFolder, *epochs: int) -> list[Path]:
    for epoch in epochs:
        write_checkpoint(folder, make_content(epoch), 0, None)
    return [Path(folder.url, name) for name in folder.names()]


def epochs_in(folder: CheckpointFolder) -> list[int]:
    return [folder.open(name).manifest.about["epoch"] for name in folder.names()]


def chosen_epoch(folder: CheckpointFolder, epochs: int = 9) -> int | None:
    checkpoint = folder.newest(
        lambda checkpoint: check_progress(folder.url, FitManifest.of(checkpoint), IDENTITY, epochs)
    )
    return None if checkpoint is None else FitManifest.of(checkpoint).epoch


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return fit_folder(str(tmp_path / "checkpoints"), num_kept=9)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("spoil", "file", "said"),
    [
        (cut, TENSORS, "it has .* bytes instead of"),
        (flip_a_bit, STATE, "its content does not match its checksum"),
        (Path.unlink, STATE, "it is missing"),
    ],
)
def test_damaged_file_is_named(folder, spoil, file, said):
    _, newest = write(folder, 1, 2)
    spoil(newest / file)
    with pytest.raises(CheckpointError, match=rf"{newest.name}/{file} is damaged: {said}"):
        folder.open(newest.name).check()
    assert chosen_epoch(folder) == 1


@pytest.mark.parametrize(
    ("spoil", "said"), [(Path.unlink, "it was not written to its end"), (cut, f"{MANIFEST}, JSONDecodeError")]
)
def test_checkpoint_before_one_without_a_manifest_is_used_with_a_warning(folder, caplog, spoil, said):
    _, _, newest = write(folder, 1, 2, 3)
    assert chosen_epoch(folder) == 3
    spoil(newest / MANIFEST)
    with caplog.at_level(logging.WARNING):
        assert chosen_epoch(folder) == 2
    (record,) = caplog.records
    assert re.search(rf"is skipped, .*{newest.name}.*{said}", record.getMessage())


def test_fit_starts_from_the_beginning_with_a_warning_if_no_checkpoint_is_whole(folder, caplog):
    (path,) = write(folder, 1)
    cut(path / STATE)
    with caplog.at_level(logging.WARNING):
        assert chosen_epoch(folder) is None
    assert "training starts from the beginning" in caplog.text
    assert chosen_epoch(fit_folder(folder.url + "-empty")) is None


def test_last_and_best_checkpoints_are_kept_and_damaged_and_partial_ones_removed(tmp_path):
    folder = fit_folder(str(tmp_path), num_kept=2)
    half, damaged = write(folder, 1, 2)
    (half / MANIFEST).unlink()
    cut(damaged / STATE)
    assert folder.newest() is None
    assert folder.damaged == [damaged.name, half.name]
    with CheckpointWriter(folder, is_divided=False, advice="") as writer:
        for epoch in (3, 4, 5, 6):
            writer.write(make_content(epoch, is_best=epoch == 4))
    assert epochs_in(folder) == [4, 5, 6]
    with CheckpointWriter(fit_folder(str(tmp_path)), is_divided=False, advice="") as writer:
        writer.write(make_content(7, is_best=True))
    assert epochs_in(folder) == [7]


def test_late_checkpoint_of_lost_ranks_removes_nothing_of_their_successors(tmp_path):
    folder, begun = fit_folder(str(tmp_path)), []

    def begin_another() -> None:
        if folder.names() and not begun:
            begun.append(folder.begin("later"))

    write(CheckpointFolder(str(tmp_path), "fit", check=begin_another), 1)
    (later,) = begun
    assert [folder.is_complete(name) for name in folder.names()] == [True, False]
    assert folder.names()[-1] == later


def test_ranks_of_a_fit_that_were_replaced_cannot_write(tmp_path):
    def wait(text: str) -> None:
        raise AssertionError(text)

    with hold_alone(str(tmp_path), wait) as lease:
        folder = fit_folder(str(tmp_path), lease=lease.name)
        write(folder, 1)
        write(fit_folder(str(tmp_path), lease=lease.change_name()), 2)
        with pytest.raises(CheckpointsInUseError, match="Another fit has taken the checkpointDir"):
            write(folder, 3)
    assert epochs_in(folder) == [2]


def test_checkpoints_of_several_kinds_do_not_see_each_other(tmp_path):
    one, other = CheckpointFolder(str(tmp_path), "state-1"), CheckpointFolder(str(tmp_path), "state-11")
    write(other, 1)
    write(one, 2, 3)
    assert (epochs_in(one), epochs_in(other)) == ([3], [1])


class HeldFolder(CheckpointFolder):
    """A folder that begins a checkpoint only once it is released."""

    def __init__(self, url: str) -> None:
        super().__init__(url, "fit")
        self.released = Event()

    def begin(self, label: str = "") -> str:
        assert self.released.wait(60)
        return super().begin(label)


def test_training_continues_while_a_checkpoint_is_written(folder):
    held = HeldFolder(folder.url)
    with CheckpointWriter(held, is_divided=False, advice="") as writer:
        writer.write(make_content(1))  # returns although the write is blocked
        assert not folder.names()
        held.released.set()
    assert epochs_in(folder) == [1]


def test_a_failing_write_is_an_error_with_path_and_remedy(folder):
    Path(folder.url).write_text("a file where the folder should be")
    writer = CheckpointWriter(folder, is_divided=False, advice="")
    writer.write(make_content(1))
    with pytest.raises(StoreError, match="epoch-00001.* in .*checkpoints could not be written: "):
        writer.write(make_content(2))
    writer.close()


def test_files_of_a_failed_write_are_removed(folder, monkeypatch):
    def fail(*args: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("sparkdl.model.weights_file.write_weights", fail)
    with pytest.raises(StoreError, match="the disk is full"):
        write(folder, 1)
    assert folder.names() == []


def test_failure_to_remove_old_checkpoints_is_a_warning_and_new_ones_are_written(folder, caplog):
    (path,) = write(folder, 1)
    (path / MANIFEST).unlink()
    (path / MANIFEST).mkdir()  # prevents finding out what to remove
    with caplog.at_level(logging.WARNING):
        write(folder, 2)
    assert "no longer kept could not be removed: " in caplog.text
    assert "IsADirectoryError" in caplog.text
    assert isinstance(folder.open(folder.names()[-1]), Checkpoint)


def test_a_fit_of_fewer_epochs_is_an_error(folder):
    write(folder, 3)
    with pytest.raises(CheckpointError, match="end of epoch 3, and epochs is 2"):
        chosen_epoch(folder, epochs=2)


def test_value_that_no_checkpoint_can_hold_is_named_when_it_is_written():
    shared = torch.ones(3)
    copied = copy_to_host({"a": shared, "b": [shared, (1, {2.0}, None)]}, "the state")
    assert copied["a"] is copied["b"][0]
    assert copied["a"].data_ptr() != shared.data_ptr()
    with pytest.raises(CheckpointError, match=r"the state\['a'\]\[1\] is a .*Path"):
        copy_to_host({"a": [1, Path("x")]}, "the state")
