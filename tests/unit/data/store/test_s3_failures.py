"""An S3 server that is missing, refuses, or does not answer: every reader reports it, and the setting to change."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs

from sparkdl.data import ParquetFeed, Store, open_dataset, scan_dataset
from sparkdl.data.store.housekeeping import remove_unless_used
from sparkdl.errors import DataError, FileVanishedError, StoreAccessError, StoreError
from tests.servers.s3_server import S3, s3, s3_endpoint

__all__ = ["s3", "s3_endpoint"]

READERS: dict[str, Callable[[str], object]] = {
    "a feed of a URL": lambda url: ParquetFeed(url, batch_size=4),
    "a feed of a file": lambda url: ParquetFeed(f"{url}/rows.parquet", batch_size=4),
    "a feed of a Store": lambda url: ParquetFeed(Store(url), batch_size=4),
    "scan_dataset": scan_dataset,
    "scan_dataset of known files": lambda url: scan_dataset(url, paths=["rows.parquet"]),
    "open_dataset": open_dataset,
}

readers = pytest.mark.parametrize("reader", READERS.values(), ids=READERS)


@pytest.fixture
def no_credentials(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)


@pytest.fixture
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")


@pytest.fixture
def closed_port(s3: S3, one_attempt: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")


@pytest.fixture
def silent_server(s3: S3, one_attempt: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("no_credentials", "no credentials were found: .*AWS_ACCESS_KEY_ID"),
        ("closed_port", "its server cannot be reached, or does not answer in time: .*AWS_ENDPOINT_URL"),
    ],
)
@readers
def test_lack_of_credentials_or_of_a_server_is_named_by_every_reader(
    request: pytest.FixtureRequest, failure: str, message: str, reader: Callable[[str], object]
) -> None:
    request.getfixturevalue(failure)
    with pytest.raises(StoreAccessError, match=rf"s3://bucket/rows.* {message}") as caught:
        reader("s3://bucket/rows")
    assert isinstance(caught.value, DataError)
    assert isinstance(caught.value, StoreError)


@readers
def test_missing_bucket_is_named_by_every_reader(s3: S3, reader: Callable[[str], object]) -> None:
    with pytest.raises(DataError, match=r"s3://no-such-bucket/rows") as caught:
        reader("s3://no-such-bucket/rows")
    # For a single object the server only answers that the object does not exist.
    is_told = reader is not READERS["scan_dataset of known files"]
    assert ("there is no such bucket" in str(caught.value)) == is_told


def test_missing_credentials_are_named_when_datasets_are_removed(no_credentials: None) -> None:
    for remove in (Store("s3://bucket/rows").cleanup, lambda: remove_unless_used("s3://bucket/rows")):
        with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID"):
            remove()


def test_read_timeout_of_a_feed_applies_to_the_first_look_at_its_source(silent_server: None) -> None:
    with pytest.raises(DataError, match=r"s3://bucket/rows .* longer than 0.2 s.* raise read_timeout_s"):
        ParquetFeed("s3://bucket/rows", batch_size=4, read_timeout_s=0.2)


def write_files(s3: S3) -> str:
    url = f"s3://{s3.make_bucket()}/rows"
    for name in ("a", "b"):
        with s3fs.S3FileSystem().open(f"{url}/{name}.parquet", "wb") as file:
            pq.write_table(pa.table({"x": np.arange(10)}), file)
    return url


def test_errors_of_files_name_them_with_their_scheme(s3: S3) -> None:
    url = write_files(s3)
    files = s3fs.S3FileSystem()
    with ParquetFeed(url, batch_size=4) as feed:
        files.rm(f"{url}/b.parquet")
        with pytest.raises(FileVanishedError, match=rf"Reading {url}/b\.parquet, row group 0 failed"):
            list(feed.epoch(0))
    files.pipe(f"{url}/b.parquet", b"no Parquet")
    with pytest.raises(DataError, match=rf"The Parquet file {url}/b\.parquet cannot be read"):
        scan_dataset(url)


def test_credentials_lost_during_an_epoch_are_named_with_the_file(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = write_files(s3)
    with ParquetFeed(url, batch_size=4, shuffle=False) as feed:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(StoreAccessError, match=rf"Reading {url}/a\.parquet, row group 0 failed: no cred"):
            list(feed.epoch(0))
