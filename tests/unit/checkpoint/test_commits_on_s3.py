from __future__ import annotations

import pytest
import s3fs

from sparkdl.checkpoint.commit_place import CommitPlace
from sparkdl.data.files.lease import hold_alone
from sparkdl.errors import StoreError
from tests.servers.s3_server import s3, s3_endpoint
from tests.unit.checkpoint.test_commits import keep, read, refuse

__all__ = ["s3", "s3_endpoint"]


def test_commits_on_an_object_store_replace_each_other_and_are_seen_by_the_next_process(s3):
    url = f"s3://{s3.make_bucket()}/run"
    with hold_alone(url, refuse, user="run", setting="checkpoint_dir") as lease:
        commits = CommitPlace(url, lease.name)
        assert read(commits) is None
        for value in (1, 2):
            keep(commits, value)
    s3fs.S3FileSystem.clear_instance_cache()
    assert read(CommitPlace(url, lease.name)) == 2
    assert commits.position() == "commit 2 of its state"
    names = sorted(path.rsplit("/", 1)[1] for path in s3fs.S3FileSystem().ls(url))
    assert [name.rsplit("-", 1)[0] for name in names] == ["state-0-00000002"]
    with (
        pytest.raises(StoreError, match="no-such-bucket"),
        hold_alone("s3://no-such-bucket/run", refuse, user="run", setting="checkpoint_dir"),
    ):
        raise AssertionError("held")
