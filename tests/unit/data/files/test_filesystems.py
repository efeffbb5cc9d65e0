"""Locations of URLs, and files that appear there atomically."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from sparkdl.data import Store
from sparkdl.data.files.filesystems import open_location


@pytest.mark.parametrize("writer", ["", "one"])
def test_a_file_is_replaced_by_renaming_a_whole_one(tmp_path: Path, writer: str) -> None:
    location = open_location(str(tmp_path))
    (tmp_path / "state").write_bytes(b"before")
    with (tmp_path / "state").open("rb") as reader:
        location.write_whole("state", b"after", writer=writer)
        assert reader.read() == b"before"
    assert (tmp_path / "state").read_bytes() == b"after"
    assert os.listdir(tmp_path) == ["state"]


def test_file_is_not_renamed_where_files_appear_whole(tmp_path: Path) -> None:
    location = replace(open_location(str(tmp_path)), can_rename=False)
    (tmp_path / "state.tmp").mkdir()
    location.write_whole("state", b"after")
    assert (tmp_path / "state").read_bytes() == b"after"


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("memory://bucket//a//b", "memory://bucket/a/b"),
        ("file:///a//b", "file:///a/b"),
        ("file:/a//b", "file:///a/b"),
        ("//a//b", "/a/b"),
        ("dbfs:/a//b", "/dbfs/a/b"),
    ],
)
def test_empty_parts_of_a_path_lead_nowhere_else(url: str, same: str) -> None:
    found, expected = open_location(url), open_location(same)
    assert (found.path, found.spark_url) == (expected.path, expected.spark_url)
    assert open_location(Store(url).url).path == expected.path
