"""The datasets that a cleanup removes or keeps, on a local disk and on a store without folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from sparkdl.data import ParquetDataset, Store
from sparkdl.data.store.housekeeping import remove_unless_used
from sparkdl.data.store.store import reopen_dataset, use_dataset, use_if_removable
from sparkdl.errors import StoreError
from tests.unit.data.store.test_store import commit_copy, store

__all__ = ["store"]

WriteDataset = Callable[[Sequence[Sequence[int]]], ParquetDataset]


@pytest.fixture
def rows(write_dataset: WriteDataset) -> ParquetDataset:
    return write_dataset([[10, 3], [20]])


def names_in(store: Store) -> list[str]:
    return sorted(
        str(path).rsplit("/", 1)[-1]
        for path in store.location.filesystem.ls(store.location.path, detail=False)
    )


def test_datasets_unused_for_long_enough_are_removed_and_named(store: Store, rows: ParquetDataset) -> None:
    datasets = [commit_copy(store, rows), commit_copy(store, rows)]
    assert store.cleanup() == []
    assert store.cleanup(timedelta(hours=1)) == []
    assert store.cleanup(timedelta(0)) == sorted(dataset.url for dataset in datasets)
    assert names_in(store) == []


def test_datasets_in_use_are_kept_whatever_their_age(store: Store, rows: ParquetDataset) -> None:
    read = commit_copy(store, rows)
    with use_dataset(read.url), store.stage_dataset("other") as staged:
        assert store.cleanup(timedelta(0)) == []
        assert not remove_unless_used(read.url)
        assert staged.url.startswith(f"{store.url}/other-")
    assert store.cleanup(timedelta(0)) == [read.url]


def test_files_of_others_in_the_store_are_never_removed(store: Store, rows: ParquetDataset) -> None:
    store.location.filesystem.makedirs(f"{store.location.path}/mine", exist_ok=True)
    store.location.filesystem.put(rows.url + "/", f"{store.location.path}/mine/", recursive=True)
    with store.location.filesystem.open(f"{store.location.path}/notes.txt", "wb") as file:
        file.write(b"mine")
    assert store.cleanup(timedelta(0)) == []
    assert not remove_unless_used(f"{store.url}/mine")
    assert {"mine", "notes.txt"} <= set(names_in(store))
    assert len(store.location.filesystem.ls(f"{store.location.path}/mine")) == 2


def test_a_use_whose_process_died_ends_by_itself(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    dead = f"{store.url}/fit-dead"
    use = use_dataset(dead)
    (mark,) = Path(dead).iterdir()
    assert store.cleanup(timedelta(0)) == []
    an_hour_ago = mark.stat().st_mtime - 3600
    os.utime(mark, (an_hour_ago, an_hour_ago))
    # Partial, and its writer has died: the age of other datasets in the Store does not matter.
    assert store.cleanup(timedelta(days=365)) == [dead]
    use.close()
    assert names_in(store) == []


def test_the_time_of_the_last_use_counts(tmp_path: Path, rows: ParquetDataset) -> None:
    store = Store(tmp_path / "store", keep_for=timedelta(hours=2))
    dataset = commit_copy(store, rows)
    for path in Path(dataset.url).iterdir():
        os.utime(path, (1, 1))
    reopened = reopen_dataset(dataset.url)
    assert reopened is not None
    reopened[1].close()
    assert store.cleanup() == []
    for path in Path(dataset.url).iterdir():
        os.utime(path, (1, 1))
    assert store.cleanup() == [dataset.url]


def test_dataset_marked_for_removal_is_not_reopened(tmp_path: Path, rows: ParquetDataset) -> None:
    store = Store(tmp_path / "store")
    dataset = commit_copy(store, rows)
    (Path(dataset.url) / "_removing").touch()
    assert reopen_dataset(dataset.url) is None
    with pytest.raises(StoreError, match="was removed while it was being opened"):
        use_if_removable(dataset.url)
    # The process that was to remove it died; the next cleanup does it.
    assert store.cleanup() == [dataset.url]


def test_cleanup_of_a_store_that_does_not_exist_yet_does_nothing(tmp_path: Path) -> None:
    assert Store(tmp_path / "nowhere").cleanup() == []
    assert not (tmp_path / "nowhere").exists()
