"""Errors of filesystem libraries when credentials or the server are lost: never reported as damage of a file."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import google.auth.exceptions as google_errors
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore import exceptions as boto
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.memory import MemoryFileSystem
from s3fs.errors import translate_boto_error

from sparkdl.data import ParquetFeed, scan_dataset
from sparkdl.data.dataset.row_group_file import is_damage
from sparkdl.errors import CorruptFileError, DataError, StoreAccessError

EXPIRED = "credentials have expired or cannot be renewed: .*aws sso login"
MISSING = "no credentials were found: .*AWS_ACCESS_KEY_ID"
REFUSED = "credentials do not allow it: .*Grant them permission to read and list there"
UNREACHABLE = "its server cannot be reached, or does not answer in time: .*AWS_ENDPOINT_URL.*run again"
UNKNOWN = "its filesystem failed: .*credentials that are set"


def of_s3(code: str, message: str) -> Exception:
    """The exception of s3fs for an answer of the server; most of its classes have no errno."""
    found = translate_boto_error(boto.ClientError({"Error": {"Code": code, "Message": message}}, "GetObject"))
    assert isinstance(found, OSError)
    return found


def of_azure(name: str, message: str, code: str | None = None) -> Exception:
    """Stand-in for an exception of Azure's packages, which are not installed for tests."""
    error = type(name, (Exception,), {"__module__": "azure.core.exceptions"})(message)
    error.error_code = code
    return error


FAILURES: dict[str, tuple[Callable[[], Exception], str]] = {
    "expired token": (lambda: of_s3("ExpiredToken", "The provided token has expired."), EXPIRED),
    "clock": (lambda: of_s3("RequestTimeTooSkewed", "Too large a difference"), "the clock of this machine"),
    "refused": (lambda: of_s3("AccessDenied", "No"), REFUSED),
    "archived": (lambda: of_s3("InvalidObjectState", "Not for the object's storage class"), UNKNOWN),
    "slow client": (lambda: of_s3("RequestTimeout", "Your socket was not read from"), UNREACHABLE),
    "slow server": (lambda: of_s3("SlowDown", "Please reduce your request rate."), UNREACHABLE),
    "invalid token": (lambda: of_s3("InvalidToken", "The provided token is malformed"), REFUSED),
    "read timeout": (lambda: boto.ReadTimeoutError(endpoint_url="https://s3.test/b/x.parquet"), UNREACHABLE),
    "connection closed": (lambda: boto.ConnectionClosedError(endpoint_url="https://s3.test/b"), UNREACHABLE),
    "connect timeout": (lambda: boto.ConnectTimeoutError(endpoint_url="https://s3.test/b"), UNREACHABLE),
    "proxy": (lambda: boto.ProxyConnectionError(proxy_url="http://proxy.test"), UNREACHABLE),
    "certificate": (lambda: boto.SSLError(endpoint_url="https://s3.test/b", error="x"), UNREACHABLE),
    "short answer": (lambda: boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), UNKNOWN),
    "timeout of fsspec": (FSTimeoutError, UNREACHABLE),
    "partial": (lambda: boto.PartialCredentialsError(provider="env", cred_var="secret_key"), MISSING),
    "profile": (lambda: boto.ProfileNotFound(profile="work"), MISSING),
    "expired SSO": (boto.UnauthorizedSSOTokenError, EXPIRED),
    "SSO not logged in": (lambda: boto.SSOTokenLoadError(error_msg="x", profile_name="work"), EXPIRED),
    "renewal": (lambda: boto.CredentialRetrievalError(provider="process", error_msg="x"), EXPIRED),
    "no credentials of Google": (lambda: google_errors.DefaultCredentialsError("Not found."), MISSING),
    "expired at Google": (lambda: google_errors.RefreshError("invalid_grant: Token expired."), EXPIRED),
    "refused by Google": (lambda: OSError("Forbidden: https://storage.test/b/o/x\ndenied"), REFUSED),
    "no credentials of Azure": (lambda: of_azure("CredentialUnavailableError", "No token"), MISSING),
    "refused by Azure": (
        lambda: of_azure("HttpResponseError", "Not authorized.", "AuthorizationPermissionMismatch"),
        REFUSED,
    ),
    "wrong key of Azure": (lambda: of_azure("ClientAuthenticationError", "Server failed"), REFUSED),
    "silent Azure": (lambda: of_azure("ServiceResponseError", "Response timeout"), UNREACHABLE),
}


class FailingFile(io.RawIOBase):
    """An open file that cannot be read."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def read(self, size: int = -1) -> bytes:
        raise self.error

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset

    def tell(self) -> int:
        return 1 << 20

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


class FailingFileSystem(MemoryFileSystem):
    """A memory filesystem that fails to read once ``make`` is set."""

    protocol = "failing"
    make: Callable[[], Exception] | None = None
    when = "opened"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb" and FailingFileSystem.make is not None:
            error = FailingFileSystem.make()
            if self.when == "opened":
                raise error
            return FailingFile(error)
        return super()._open(path, mode, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("failing://", "memory://"))


@pytest.fixture
def url() -> Iterator[str]:
    fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
    files = fsspec.filesystem("failing")
    with files.open("/lost/x.parquet", "wb") as file:
        pq.write_table(pa.table({"x": np.arange(10)}), file)
    yield "failing://lost"
    FailingFileSystem.make = None
    files.rm("/lost", recursive=True)


@pytest.mark.parametrize("when", ["opened", "read"])
@pytest.mark.parametrize(("make", "why"), FAILURES.values(), ids=FAILURES)
def test_a_store_that_is_lost_is_not_a_damaged_file(
    url: str, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Exception], why: str, when: str
) -> None:
    monkeypatch.setattr(FailingFileSystem, "when", when)
    with ParquetFeed(url, batch_size=4) as feed:
        FailingFileSystem.make = staticmethod(make)
        with pytest.raises(StoreAccessError, match=f"(?s)x.parquet, row group 0 failed: .*{why}"):
            list(feed)
        with pytest.raises(StoreAccessError, match=f"(?s)x.parquet cannot be read: .*{why}"):
            scan_dataset(url)


def test_filesystem_lost_while_the_column_is_searched_is_not_reported_as_damage(url: str) -> None:
    errors = iter([OSError("Couldn't deserialize thrift"), FSTimeoutError()])
    with ParquetFeed(url, batch_size=4) as feed:
        FailingFileSystem.make = staticmethod(lambda: next(errors))
        with pytest.raises(StoreAccessError, match=UNREACHABLE):
            list(feed)


@pytest.mark.parametrize(
    ("error", "damaged"),
    [
        (OSError("Corrupt snappy compressed data."), True),
        (pa.ArrowInvalid("Parquet magic bytes not found"), True),
        (PermissionError("The provided token has expired."), False),
        (TimeoutError(), False),
        (OSError(5, "Input/output error"), False),
        (pa.ArrowNotImplementedError("Unsupported codec"), False),
        (KeyError("x"), False),
    ],
)
def test_only_errors_of_arrow_count_as_damage(url: str, error: Exception, damaged: bool) -> None:
    assert is_damage(error) == damaged
    FailingFileSystem.make = staticmethod(lambda: error)
    with pytest.raises(DataError) as caught:
        scan_dataset(url)
    assert isinstance(caught.value, CorruptFileError) == damaged
