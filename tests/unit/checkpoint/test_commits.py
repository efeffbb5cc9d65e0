"""Commits: the last one of each state is kept, and only the ranks of the last start write them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from sparkdl.checkpoint import tensors as tensors_module
from sparkdl.checkpoint.commit_place import SETTING, USER, CommitPlace
from sparkdl.checkpoint.tensors import Content, write_checkpoint
from sparkdl.data.files.lease import hold_alone
from sparkdl.errors import CheckpointsInUseError, StoreError
from sparkdl.runner import Runner


def refuse(text):
    raise AssertionError(text)


def keep(commits, value, state=0):
    tensors = {"model/weight": torch.full((2,), float(value))}
    content = Content(label="", tensors=tensors, state={"epoch": value}, about={})
    write_checkpoint(commits.folder(state), content, 0, None)


def read(commits, state=0):
    checkpoint = commits.folder(state).newest()
    return None if checkpoint is None else checkpoint.load_state()["epoch"]


@pytest.fixture
def lease(tmp_path):
    with hold_alone(str(tmp_path / "commits"), refuse, user=USER, setting=SETTING) as sole:
        yield sole


@pytest.fixture
def commits(lease):
    return CommitPlace(lease.url, lease.name)


def names_in(commits):
    return sorted(
        path.name.rsplit("-", 1)[0] for path in Path(commits.url).iterdir() if not path.name.startswith("_")
    )


def test_only_the_last_commit_of_each_state_is_kept_and_read(commits):
    assert read(commits) is None
    assert commits.position() == "the beginning, as nothing was committed"
    for value in (1, 2, 3):
        keep(commits, value)
    keep(commits, 11, state=11)
    assert (read(commits), read(commits, 11), read(commits, 1)) == (3, 11, None)
    assert commits.position() == "commit 3 of its state"
    assert names_in(commits) == ["state-0-00000003", "state-11-00000001"]


def test_unfinished_commit_of_a_killed_process_is_never_read(commits):
    keep(commits, 1)
    commits.folder(0).begin()
    assert read(commits) == 1
    keep(commits, 3)
    assert read(commits) == 3
    assert names_in(commits) == ["state-0-00000003"]


def test_a_damaged_commit_is_skipped_with_a_warning_that_names_it(commits, caplog):
    keep(commits, 1)
    (first,) = Path(commits.url).glob("state-*")
    second = first.with_name(first.name.replace("00000001", "00000002"))
    shutil.copytree(first, second)
    (second / "rank-00000.pt").write_bytes(b"no archive")
    with caplog.at_level(logging.WARNING):
        assert read(commits) == 1
        assert f"{second}/rank-00000.pt, it has 10 bytes instead of" in caplog.text
        (first / "rank-00000.safetensors").unlink()
        assert "from the beginning" not in caplog.text
        assert read(commits) is None
        assert "rank-00000.safetensors, it is missing" in caplog.text
        assert f"{commits.url} holds no other checkpoint: training starts from the beginning" in caplog.text
    keep(commits, 3)
    assert names_in(commits) == ["state-0-00000003"]


def test_ranks_that_were_replaced_cannot_write(lease, commits):
    keep(commits, 1)
    renewed = CommitPlace(lease.url, lease.change_name())
    assert read(renewed) == 1
    with pytest.raises(CheckpointsInUseError, match="this rank was considered lost"):
        keep(commits, 2)
    keep(renewed, 3)
    assert read(renewed) == 3


def test_a_commit_that_took_too_long_to_write_is_given_up(lease, commits, monkeypatch):
    keep(commits, 1)
    write_files = tensors_module.write_files

    def write_late(*args):
        files = write_files(*args)
        lease.change_name()
        return files

    monkeypatch.setattr(tensors_module, "write_files", write_late)
    with pytest.raises(CheckpointsInUseError):
        keep(commits, 2)
    assert read(commits) == 1
    assert names_in(commits) == ["state-0-00000001"]


def test_a_folder_that_only_the_driver_sees_is_named_on_the_rank(tmp_path):
    with pytest.raises(StoreError, match=r"cannot reach\. Choose a checkpoint_dir .* SPARKDL_STORE"):
        keep(CommitPlace(str(tmp_path / "elsewhere"), "_alone-mine"), 1)


def test_folder_without_a_name_is_removed_after_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARKDL_STORE", str(tmp_path / "store"))
    with Runner(num_workers=1, local=True)._hold_commits(is_local=True) as none:
        assert none is None
    for is_local in (True, False):
        runner = Runner(num_workers=1, max_restarts=1, local=True)
        with runner._hold_commits(is_local=is_local) as lease:
            commits = CommitPlace(lease.url, lease.name)
            keep(commits, 1)
            assert commits.url.startswith(str(tmp_path)) is not is_local
        assert not Path(commits.url).exists()
    runner = Runner(num_workers=1, checkpoint_dir=tmp_path / "named", local=True)
    for other in (None, runner):
        with runner._hold_commits(is_local=False) as lease:
            keep(CommitPlace(lease.url, lease.name), 1)
            if other is not None:
                with pytest.raises(CheckpointsInUseError, match="Another run, of process"):
                    other._hold_commits(is_local=False).__enter__()
    assert read(CommitPlace(lease.url, lease.name)) == 1
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file cannot be written.*Choose a checkpoint_dir"):
        Runner(num_workers=1, checkpoint_dir=tmp_path / "file", local=True)._hold_commits(
            is_local=False
        ).__enter__()
