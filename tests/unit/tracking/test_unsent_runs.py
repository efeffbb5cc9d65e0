"""Runs kept in a Store that is not a local folder."""

from __future__ import annotations

from pathlib import Path

import fsspec
import mlflow
import pytest

from sparkdl.data import Store
from sparkdl.errors import StoreError
from sparkdl.tracking import send_kept_runs
from sparkdl.tracking.kept_runs import KeptRun, keep_run
from sparkdl.tracking.sender import Message
from sparkdl.tracking.start import RunStart


def kept(key, start_time, folder):
    message = Message(kind="folder", content={"path": "model"}, folder=folder)
    start = RunStart(key=key, name=key, start_time=start_time)
    uri = mlflow.get_tracking_uri()
    return KeptRun(tracking_uri=uri, start=start, run=None, messages=[message])


def test_runs_are_sent_from_another_filesystem_the_oldest_first_and_leave_nothing_behind(tracked):
    store = Store(f"memory://sparkdl-unsent-{tracked.name}")
    (tracked / "model" / "deep").mkdir(parents=True)
    (tracked / "model" / "deep" / "weights").write_bytes(b"1234")
    for key, start_time in (("later", 2), ("earlier", 1)):
        url = keep_run(kept(key, start_time, tracked / "model"), store)
        assert url.startswith(f"{store.url}/unsent-runs/")
    store.cleanup()
    sent = send_kept_runs(store)
    runs = [mlflow.get_run(one.run_id) for one in sent]
    assert [run.info.run_name for run in runs] == ["earlier", "later"]
    for run in runs:
        weights = Path(mlflow.artifacts.download_artifacts(f"{run.info.artifact_uri}/model/deep/weights"))
        assert weights.read_bytes() == b"1234"
    filesystem, path = fsspec.core.url_to_fs(store.url)
    assert not filesystem.exists(f"{path}/unsent-runs")


def test_a_folder_without_its_last_file_is_left_alone(tmp_path):
    folder = tmp_path / "store" / "unsent-runs" / "broken-off" / "0000"
    folder.mkdir(parents=True)
    assert send_kept_runs(Store(tmp_path / "store")) == []
    assert folder.is_dir()


def test_a_store_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(StoreError, match=r"The Store .*/store cannot be written"):
        keep_run(kept("a", 1, tmp_path), Store(tmp_path / "store"))
