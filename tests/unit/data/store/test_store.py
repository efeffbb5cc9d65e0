from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import fsspec
import pytest

from sparkdl.data import ParquetDataset, Store, open_dataset, scan_dataset
from sparkdl.data.dataset.dataset import MANIFEST_NAME
from sparkdl.data.files.filesystems import open_location
from sparkdl.data.store.housekeeping import remove_unless_used
from sparkdl.errors import ParamError, StoreError

WriteDataset = Callable[[Sequence[Sequence[int]]], ParquetDataset]


def commit_copy(store: Store, dataset: ParquetDataset) -> ParquetDataset:
    with store.stage_dataset("a-fit") as staged:
        store.location.filesystem.put(dataset.url + "/", open_location(staged.url).path, recursive=True)
        return staged.commit(replace(dataset, url=staged.url))


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return Store(tmp_path / "store")
    fsspec.filesystem("memory").rm("/", recursive=True)
    return Store("memory://bucket/store")


def test_a_committed_dataset_is_described_by_its_manifest(store: Store, write_dataset: WriteDataset) -> None:
    committed = commit_copy(store, write_dataset([[10, 3], [20]]))
    assert committed.url.startswith(f"{store.url}/a-fit-")
    assert open_dataset(committed.url) == committed == scan_dataset(committed.url)
    assert open_dataset(committed.url).column("id").value_range == (0, 32)
    assert store.location.filesystem.ls(store.location.path, detail=False) == [
        open_location(committed.url).path
    ]


def test_a_dataset_that_failed_leaves_nothing_behind(store: Store, write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[10]])
    with pytest.raises(RuntimeError, match="gave up"), store.stage_dataset("a-fit") as staged:
        store.location.filesystem.put(dataset.url + "/", open_location(staged.url).path, recursive=True)
        raise RuntimeError("the executors gave up")
    assert store.location.filesystem.ls(store.location.path, detail=False) == []


def test_a_folder_without_manifest_is_neither_read_nor_deleted(write_dataset: WriteDataset) -> None:
    dataset = write_dataset([[10]])
    with pytest.raises(StoreError, match="holds no complete dataset"):
        open_dataset(dataset.url)
    assert not remove_unless_used(dataset.url)
    assert (Path(dataset.url) / "part-00000.parquet").exists()


def test_deleting_a_dataset_twice_is_no_error(store: Store, write_dataset: WriteDataset) -> None:
    committed = commit_copy(store, write_dataset([[10]]))
    assert remove_unless_used(committed.url)
    assert not remove_unless_used(committed.url)
    assert not store.location.filesystem.exists(open_location(committed.url).path)


def test_a_damaged_manifest_is_an_error(tmp_path: Path, write_dataset: WriteDataset) -> None:
    committed = commit_copy(Store(tmp_path / "store"), write_dataset([[10]]))
    for text in ("{", "{}", "[]"):
        (Path(committed.url) / MANIFEST_NAME).write_text(text)
        with pytest.raises(StoreError, match="manifest of .* cannot be read: "):
            open_dataset(committed.url)


def test_store_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"cannot be written.*every executor can write"):
        Store(tmp_path / "file" / "store").check_writable()


def test_a_writable_store_is_made_and_stays_empty(store: Store) -> None:
    store.check_writable()
    assert store.location.filesystem.ls(store.location.path, detail=False) == []


@pytest.mark.parametrize(
    ("url", "plugin", "remedy"),
    [
        ("gs://bucket/folder", "gcsfs", r"pip install gcsfs, .*extra 'gcs'"),
        ("s3://bucket/folder", "s3fs", r"pip install s3fs, .*extra 's3'"),
        ("abfss://c@a.dfs.core.windows.net/folder", "adlfs", r"pip install adlfs, .*extra 'azure'"),
        ("abfs://c@a.dfs.core.windows.net/folder", "adlfs", r"pip install adlfs, .*extra 'azure'"),
        ("nosuchscheme://x", "nosuchscheme", r"Fix the URL, or install the plugin .* for nosuchscheme"),
    ],
)
def test_a_missing_plugin_is_named_by_what_to_install(
    monkeypatch: pytest.MonkeyPatch, url: str, plugin: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, plugin, None)
    scheme = url.partition(":")[0]
    # After an earlier test opened such a URL, fsspec remembers the plugin.
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)
    with pytest.raises(StoreError, match=rf"{scheme}:.* cannot be opened: .*{remedy}\."):
        Store(url).check_writable()


def test_a_missing_hadoop_client_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("JAVA_HOME", "HADOOP_HOME", "ARROW_LIBHDFS_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(StoreError, match="Hadoop client") as caught:
        Store("hdfs://nowhere/folder").check_writable()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Store(""), "path of a folder is empty"),
        (lambda: scan_dataset(" "), "path of a folder is empty"),
        (lambda: Store(None), "takes a path or a URL, got NoneType"),
        (lambda: Store("x", keep_for=5), r"keep_for must be a datetime\.timedelta, got 5"),
        (lambda: Store("x", keep_for=timedelta(-1)), "keep_for must not be negative"),
        (lambda: Store("x").cleanup(5), r"older_than must be a datetime\.timedelta, got 5"),
        (lambda: Store("x").cleanup(timedelta(-1)), "older_than must not be negative"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ParamError, match=message):
        make()


@pytest.mark.parametrize(
    ("url", "path", "spark_url"),
    [
        ("/mnt/shared/", "/mnt/shared", "file:///mnt/shared"),
        ("/mnt/my store", "/mnt/my store", "file:///mnt/my store"),
        ("file:/mnt/shared", "/mnt/shared", "file:///mnt/shared"),
        ("file:///mnt/shared", "/mnt/shared", "file:///mnt/shared"),
        ("file:///mnt/my%20store", "/mnt/my%20store", "file:///mnt/my%20store"),
        ("dbfs:/tmp/x", "/dbfs/tmp/x", "dbfs:/tmp/x"),
        ("/dbfs/tmp/x", "/dbfs/tmp/x", "dbfs:/tmp/x"),
        ("/Volumes/c/s/v", "/Volumes/c/s/v", "dbfs:/Volumes/c/s/v"),
        ("dbfs:/Volumes/c/s/v", "/Volumes/c/s/v", "dbfs:/Volumes/c/s/v"),
        ("memory://a/b", "/a/b", "memory://a/b"),
    ],
)
def test_a_url_means_one_place_to_python_and_to_spark(url: str, path: str, spark_url: str) -> None:
    location = Store(url).location
    assert (location.path, location.spark_url) == (path, spark_url)


def test_default_store_is_the_users_cache_unless_configured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARKDL_STORE", "s3://bucket/sparkdl")
    assert Store.default().url == "s3://bucket/sparkdl"
    monkeypatch.delenv("SPARKDL_STORE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Store.default().url == str(tmp_path / "sparkdl")


def test_a_store_travels_by_pickle() -> None:
    store = Store("memory://bucket/store")
    store.check_writable()
    assert pickle.loads(pickle.dumps(store)).url == store.url
