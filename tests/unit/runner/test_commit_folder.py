from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparkdl.errors import CheckpointError, CheckpointsInUseError, ParamError, StoreError
from sparkdl.runner.commit_folder import CommitFolder, commit_folder
from sparkdl.training.checkpoint import files


def contents_of(value):
    return {"parts": {"model": {"weight": torch.full((2,), float(value))}}, "objects": {"epoch": value}}


@pytest.fixture
def folder(tmp_path):
    found = CommitFolder(str(tmp_path / "commits"), "mine")
    found.claim()
    return found


def names_in(folder):
    return sorted(path.name for path in Path(folder.url.removeprefix("file://")).iterdir())


def test_only_the_last_commit_of_each_state_is_kept_and_read(folder):
    assert folder.last(0) is None
    assert folder.position() == "the beginning, as nothing was committed"
    for value in (1, 2, 3):
        folder.keep(0, contents_of(value))
    folder.keep(11, contents_of(11))
    assert folder.last(0)["objects"] == {"epoch": 3}
    assert folder.last(0)["parts"]["model"]["weight"].tolist() == [3.0, 3.0]
    assert folder.last(11)["objects"] == {"epoch": 11}
    assert folder.last(1) is None
    assert folder.position() == "commit 3 of its state"
    assert names_in(folder) == ["owner.json", "state-0-commit-3.pt", "state-11-commit-1.pt"]


def test_unfinished_commit_of_a_killed_process_is_never_read(folder, tmp_path):
    folder.keep(0, contents_of(1))
    (tmp_path / "commits" / "state-0-commit-2.pt.tmp").write_bytes(b"half of")
    assert folder.last(0)["objects"] == {"epoch": 1}
    folder.keep(0, contents_of(2))
    assert folder.last(0)["objects"] == {"epoch": 2}
    folder.reclaimed()
    assert names_in(folder) == ["owner.json", "state-0-commit-2.pt"]


def test_newer_of_two_commits_is_read_if_the_process_was_killed_between_them(folder, tmp_path):
    folder.keep(0, contents_of(1))
    first = (tmp_path / "commits" / "state-0-commit-1.pt").read_bytes()
    folder.keep(0, contents_of(2))
    (tmp_path / "commits" / "state-0-commit-1.pt").write_bytes(first)
    assert folder.last(0)["objects"] == {"epoch": 2}
    folder.keep(0, contents_of(3))
    assert names_in(folder) == ["owner.json", "state-0-commit-3.pt"]


def test_a_damaged_commit_is_named(folder, tmp_path):
    (tmp_path / "commits" / "state-0-commit-4.pt").write_bytes(b"no archive")
    with pytest.raises(CheckpointError, match=r"state-0-commit-4\.pt, is damaged"):
        folder.last(0)


def test_run_whose_folder_was_claimed_by_another_run_cannot_write(folder):
    folder.keep(0, contents_of(1))
    other = CommitFolder(folder.url, "other")
    other.claim()
    with pytest.raises(CheckpointsInUseError, match="Another run has claimed the checkpoint_dir"):
        folder.keep(0, contents_of(2))
    assert other.last(0)["objects"] == {"epoch": 1}


def test_ranks_that_were_replaced_cannot_write(folder):
    folder.keep(0, contents_of(1))
    anew = folder.reclaimed()
    assert anew.last(0)["objects"] == {"epoch": 1}
    with pytest.raises(CheckpointsInUseError, match="this rank was taken for lost"):
        folder.keep(0, contents_of(2))
    anew.keep(0, contents_of(3))
    assert anew.last(0)["objects"] == {"epoch": 3}


def test_a_commit_that_took_too_long_to_write_is_given_up(folder, monkeypatch):
    folder.keep(0, contents_of(1))
    written = files.write_file

    def write_late(*args):
        said = written(*args)
        CommitFolder(folder.url, "other").claim()
        return said

    monkeypatch.setattr(files, "write_file", write_late)
    with pytest.raises(CheckpointsInUseError):
        folder.keep(0, contents_of(2))
    assert CommitFolder(folder.url, "other").last(0)["objects"] == {"epoch": 1}
    assert names_in(folder) == ["owner.json", "state-0-commit-1.pt"]


def test_restarted_run_does_not_reclaim_the_folder_from_another_run(folder):
    CommitFolder(folder.url, "other").claim()
    with pytest.raises(CheckpointsInUseError):
        folder.reclaimed()


def test_a_folder_that_only_the_driver_sees_is_named_on_the_rank(tmp_path):
    unseen = CommitFolder(str(tmp_path / "elsewhere"), "mine")
    with pytest.raises(StoreError, match=r"cannot reach\. Give the Runner a checkpoint_dir .* SPARKDL_STORE"):
        unseen.last(0)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be kept in .*file"):
        CommitFolder(str(tmp_path / "file"), "mine").claim()


def test_value_that_could_not_be_read_again_is_refused_with_its_name(folder):
    with pytest.raises(ParamError, match="The state's best is a object, which a commit cannot hold"):
        folder.keep(0, {"parts": {}, "objects": {"epoch": 1, "best": object()}})
    for unreadable in (object(), lambda: 1):  # one can be pickled, one cannot
        with pytest.raises(ParamError, match="The state's model is a dict"):
            folder.keep(0, {"parts": {"other": {}, "model": {"hook": unreadable}}, "objects": {}})
    assert folder.last(0) is None
    assert names_in(folder) == ["owner.json"]


def test_folder_without_a_name_is_removed_after_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARKDL_STORE", str(tmp_path / "store"))
    with commit_folder(None, is_wanted=False, is_local=True) as none:
        assert none is None
    for is_local in (True, False):
        with commit_folder(None, is_wanted=True, is_local=is_local) as found:
            found.keep(0, contents_of(1))
            assert found.url.startswith(str(tmp_path)) is not is_local
        with pytest.raises(StoreError):
            found.last(0)
    with commit_folder(tmp_path / "named", is_wanted=False, is_local=False) as named:
        named.keep(0, contents_of(1))
    assert named.last(0)["objects"] == {"epoch": 1}


def test_rank_reads_the_pieces_of_the_commit_that_was_completed(folder, tmp_path):
    def keep(owner, value):
        commit = owner.next_commit(0)
        for rank in range(2):
            owner.keep_piece(0, commit, rank, {"model": {"weight": torch.full((1,), value + rank)}})
        owner.keep(0, {"parts": {}, "objects": {"epoch": value}, "pieces": {"num_ranks": 2}})

    def read(owner):
        contents = owner.last(0)
        pieces = [owner.piece(0, contents["pieces"], rank) for rank in range(2)]
        return contents["objects"]["epoch"], [piece["model"]["weight"].item() for piece in pieces]

    keep(folder, 10)
    keep(folder, 20)
    assert read(folder) == (20, [20, 21])
    assert names_in(folder) == [
        "owner.json",
        "state-0-commit-2-rank-0-mine.pt",
        "state-0-commit-2-rank-1-mine.pt",
        "state-0-commit-2.pt",
    ]
    # And killed before rank 0 committed.
    folder.keep_piece(0, 3, 1, {"model": {"weight": torch.full((1,), 99.0)}})
    anew = folder.reclaimed()
    assert read(anew) == (20, [20, 21])
    keep(anew, 30)
    assert read(anew) == (30, [30, 31])
    assert len(names_in(folder)) == 4
    with pytest.raises(CheckpointsInUseError):
        folder.keep_piece(0, 4, 1, {})
    for path in (tmp_path / "commits").glob("*-rank-1-*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"rank-1-.*\.pt, is damaged"):
        read(anew)
