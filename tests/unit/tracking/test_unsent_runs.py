"""The data of runs kept in a Store, on a local disk and on another filesystem."""

from __future__ import annotations

import fsspec
import pytest

from sparkdl.data import Store
from sparkdl.errors import StoreError
from sparkdl.tracking.kept_runs import UnsentRuns, send_kept_runs


@pytest.fixture(params=["disk", "memory"])
def store(request, tmp_path):
    if request.param == "disk":
        yield Store(tmp_path / "store")
        return
    url = f"memory://sparkdl-unsent-{tmp_path.name}"
    yield Store(url)
    filesystem, path = fsspec.core.url_to_fs(url)
    if filesystem.exists(path):
        filesystem.rm(path, recursive=True)


def test_folders_come_back_as_they_were_and_leave_nothing_behind(store, tmp_path):
    shelf = UnsentRuns(store)
    assert shelf.names() == []
    model = tmp_path / "model"
    (model / "deep").mkdir(parents=True)
    (model / "deep" / "weights").write_bytes(b"1234")
    for name in ("b", "a"):
        place = shelf.put(name, {"0000": model}, {"run.json": b"{}"})
        assert place == f"{store.url}/unsent-runs/{name}"
    assert shelf.names() == ["a", "b"]
    there = tmp_path / "there"
    there.mkdir()
    shelf.get("a", there)
    assert (there / "0000" / "deep" / "weights").read_bytes() == b"1234"
    assert (there / "run.json").read_bytes() == b"{}"
    assert sorted(path.name for path in there.iterdir()) == ["0000", "run.json"]
    store.cleanup()
    assert shelf.names() == ["a", "b"]
    for name in ("a", "b"):
        shelf.remove(name)
    assert shelf.names() == []
    assert not store.location.filesystem.exists(f"{store.location.path}/unsent-runs")


def test_a_folder_without_its_last_file_is_left_alone(store, tmp_path):
    shelf = UnsentRuns(store)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"12")
    shelf.put("broken-off", {"0000": tmp_path / "model"}, {})
    assert send_kept_runs(store) == []
    assert shelf.names() == ["broken-off"]


def test_a_store_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(StoreError, match=r"The Store .*/store cannot be written"):
        UnsentRuns(Store(tmp_path / "store")).put("a", {}, {"run.json": b"{}"})
