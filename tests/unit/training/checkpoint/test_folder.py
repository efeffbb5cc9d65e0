"""Checkpoint files: which one a fit resumes from, which ones are kept, and the warnings about damaged ones."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from sparkdl.errors import CheckpointError, StoreError
from sparkdl.training.checkpoint.choice import choose_checkpoint
from sparkdl.training.checkpoint.files import FILES, FORMAT_VERSION, MANIFEST, Content, Manifest, load_file
from sparkdl.training.checkpoint.folder import CheckpointFolder, CheckpointWriter
from sparkdl.training.checkpoint.state import copy_to_host

IDENTITY: dict[str, Any] = {"tensors": {}, "dataset": {}, "initial weights": {}, "settings": {}}


def make_content(epoch: int) -> Content:
    states = {name: {"place": (epoch, 4), "values": torch.arange(1000.0)} for name in FILES}
    done: dict[str, Any] = {"epoch": epoch, "step": 4, "ends_epoch": True, "finished": False, "epochs": 9}
    manifest = Manifest(**done, world_size=1, num_ranks_at_start=1, identity=IDENTITY)
    return Content(manifest=manifest, states=states)


def write(folder: CheckpointFolder, *epochs: int) -> list[Path]:
    return [Path(folder.url, folder.write(make_content(epoch))) for epoch in epochs]


def epochs_in(folder: CheckpointFolder) -> list[int]:
    return [folder.manifest(name).epoch for name in folder.names()]


def change_manifest(path: Path, **changes: Any) -> None:
    content = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**content, **changes}))


def chosen_epoch(folder: CheckpointFolder) -> int | None:
    _, manifest, _ = choose_checkpoint(folder, IDENTITY, epochs=9)
    return None if manifest is None else manifest.epoch


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(str(tmp_path / "checkpoints"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("spoil", "file", "said"),
    [
        (cut, "optimizer.pt", "optimizer.pt has .* bytes instead of"),
        (flip_a_bit, "ranks.pt", "ranks.pt does not match its checksum"),
        (Path.unlink, "model.pt", "model.pt is missing"),
        (Path.unlink, MANIFEST, "not written to its end"),
        (cut, MANIFEST, f"its {MANIFEST} is damaged"),
    ],
)
def test_checkpoint_before_a_damaged_one_is_used_with_a_warning(folder, caplog, spoil, file, said):
    _, _, newest = write(folder, 1, 2, 3)
    assert chosen_epoch(folder) == 3
    spoil(newest / file)
    with caplog.at_level(logging.WARNING):
        assert chosen_epoch(folder) == 2
    (record,) = caplog.records
    assert re.search(rf"{newest.name} is skipped, .*{said}", record.getMessage())


def test_fit_starts_from_the_beginning_with_a_warning_if_no_checkpoint_is_whole(folder, caplog):
    (path,) = write(folder, 1)
    cut(path / "fit.pt")
    with caplog.at_level(logging.WARNING):
        assert chosen_epoch(folder) is None
    assert "the fit starts from the beginning" in caplog.text
    assert chosen_epoch(CheckpointFolder(folder.url + "-empty")) is None


def test_written_checkpoint_is_read_back(folder):
    name = folder.write(make_content(2))
    for file in FILES:
        state = load_file(folder.location(name), file)
        assert state["place"] == (2, 4)
        assert torch.equal(state["values"], torch.arange(1000.0))


def test_last_and_best_checkpoints_are_kept_and_damaged_and_partial_ones_removed(folder):
    half, damaged = write(folder, 1, 2)
    (half / MANIFEST).unlink()
    cut(damaged / "fit.pt")
    writer = CheckpointWriter(folder, num_kept=2, damaged=[damaged.name])
    for epoch in (3, 4, 5, 6):
        writer.write(make_content(epoch), is_best=epoch == 4)
    writer.close(failed=False)
    assert epochs_in(folder) == [4, 5, 6]
    assert folder.manifest(str(folder.best())).epoch == 4
    writer = CheckpointWriter(folder, num_kept=1)
    writer.write(make_content(7), is_best=True)
    writer.close(failed=False)
    assert epochs_in(folder) == [7]


class HeldFolder(CheckpointFolder):
    """A folder that writes a checkpoint only once it is released."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.released = Event()

    def write(self, content: Content) -> str:
        assert self.released.wait(60)
        return super().write(content)


def test_training_continues_while_a_checkpoint_is_written(folder):
    held = HeldFolder(folder.url)
    writer = CheckpointWriter(held, num_kept=2)
    writer.write(make_content(1))  # returns although the write is blocked
    assert not folder.names()
    held.released.set()
    writer.close(failed=False)
    assert epochs_in(folder) == [1]


def test_a_failing_write_is_an_error_with_path_and_remedy(folder):
    Path(folder.url).write_text("a file where the folder should be")
    writer = CheckpointWriter(folder, num_kept=2)
    writer.write(make_content(1))
    with pytest.raises(StoreError, match="epoch-00001.* cannot be written.*Choose a checkpointDir"):
        writer.write(make_content(2))
    writer.close(failed=True)


def test_best_checkpoint_that_cannot_be_marked_is_an_error_with_its_path(folder):
    Path(folder.url, "best.json.tmp").mkdir(parents=True)
    writer = CheckpointWriter(folder, num_kept=2)
    writer.write(make_content(1), is_best=True)
    with pytest.raises(StoreError, match="best.json, .* cannot be written: IsADir"):
        writer.close(failed=False)


def test_failure_to_remove_old_checkpoints_is_a_warning_and_new_ones_are_written(folder, caplog):
    Path(folder.url, "best.json").mkdir(parents=True)  # prevents finding the best checkpoint
    writer = CheckpointWriter(folder, num_kept=1)
    for epoch in (1, 2):
        writer.write(make_content(epoch))
    with caplog.at_level(logging.WARNING):
        writer.close(failed=False)
    assert epochs_in(folder) == [1, 2]
    assert "no longer kept could not be removed: " in caplog.text
    assert "best.json cannot be read: IsADirectoryError" in caplog.text


def test_a_checkpoint_of_a_newer_version_is_an_error(folder):
    (path,) = write(folder, 1)
    change_manifest(path, format_version=FORMAT_VERSION + 1)
    with pytest.raises(CheckpointError, match=rf"format {FORMAT_VERSION + 1} by .*Install a newer sparkdl"):
        chosen_epoch(folder)


@pytest.mark.parametrize(
    ("world_size", "finished", "is_used"), [(1, False, True), (3, True, True), (3, False, False)]
)
def test_checkpoint_of_the_first_format_is_used_only_if_its_rows_follow_the_current_plan(
    folder, world_size, finished, is_used
):
    (path,) = write(folder, 1)
    change_manifest(path, format_version=1, world_size=world_size, finished=finished)
    if is_used:
        assert chosen_epoch(folder) == 1
        return
    with pytest.raises(CheckpointError, match="began on 1 ranks and continued on 3"):
        chosen_epoch(folder)


def test_a_fit_of_fewer_epochs_is_an_error(folder):
    write(folder, 3)
    with pytest.raises(CheckpointError, match="end of epoch 3, and epochs is 2"):
        choose_checkpoint(folder, IDENTITY, epochs=2)


def test_value_that_no_checkpoint_can_hold_is_named_when_it_is_written():
    shared = torch.ones(3)
    copied = copy_to_host({"a": shared, "b": [shared, (1, {2.0}, None)]}, "the state")
    assert copied["a"] is copied["b"][0]
    assert copied["a"].data_ptr() != shared.data_ptr()
    with pytest.raises(CheckpointError, match=r"the state\['a'\]\[1\] is a .*Path"):
        copy_to_host({"a": [1, Path("x")]}, "the state")
