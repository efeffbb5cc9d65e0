from __future__ import annotations

import pytest
import s3fs

from sparkdl.errors import StoreError
from sparkdl.runner.commit_folder import CommitFolder
from tests.servers.s3_server import s3, s3_endpoint
from tests.unit.runner.test_commit_folder import contents_of

__all__ = ["s3", "s3_endpoint"]


def test_commits_on_an_object_store_replace_each_other_and_are_seen_by_the_next_process(s3):
    url = f"s3://{s3.make_bucket()}/run"
    folder = CommitFolder(url, "mine")
    folder.claim()
    assert folder.last(0) is None
    for value in (1, 2):
        folder.keep(0, contents_of(value))
    s3fs.S3FileSystem.clear_instance_cache()
    assert CommitFolder(url, "mine").last(0)["objects"] == {"epoch": 2}
    assert folder.position() == "commit 2 of its state"
    names = sorted(path.rsplit("/", 1)[1] for path in s3fs.S3FileSystem().ls(url))
    assert names == ["owner.json", "state-0-commit-2.pt"]
    with pytest.raises(StoreError, match="no-such-bucket"):
        CommitFolder("s3://no-such-bucket/run", "mine").claim()
