"""A real S3 server on loopback, moto's, for tests of Stores there."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import s3fs
from moto.server import ThreadedMotoServer

_buckets = itertools.count()


@dataclass(frozen=True)
class S3:
    """A running S3 server.

    Attributes:
        environment: environment variables that a user sets to reach it.
    """

    environment: dict[str, str]

    def make_bucket(self) -> str:
        """Make an empty bucket; return its name."""
        bucket = f"bucket-{next(_buckets)}"
        s3fs.S3FileSystem().mkdir(bucket)
        return bucket


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3]:
    """The server, with credentials and address in the environment as a user sets them."""
    environment = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield S3(environment)
    s3fs.S3FileSystem.clear_instance_cache()
