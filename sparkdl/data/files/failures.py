"""Explains errors of filesystems and of their servers: what they mean for a Store, and what to do.

Runs on the *driver*, on *executors* and on the reader threads of every *rank*.

:data:`MEANINGS` is a table of the names by which errors are recognized: names of exception classes, of errno values and
codes of servers. They are those of the local filesystem, of the libraries behind fsspec's filesystems (botocore,
google-auth, gcsfs, azure-core and azure-identity, aiohttp, requests), and of Hadoop's filesystems, whose errors Spark
reports as text.
"""

from __future__ import annotations

import errno
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.errors import SparkdlError, StoreAccessError, StoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(frozen=True)
class Meaning:
    """The meaning of a group of errors.

    Attributes:
        names: names of exception classes and errno values, and codes of servers.
        text: what is wrong.
        remedy: what to do.
        reading_remedy: what to do if the Store was only read; empty if that is the same.
        may_pass: whether trying again can help.
    """

    names: frozenset[str]
    text: str
    remedy: str
    reading_remedy: str = ""
    may_pass: bool = False


FULL_DISK = Meaning(
    frozenset({"ENOSPC", "EDQUOT", "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"}),
    "its disk is full",
    "Make room there, call Store.cleanup(), or choose another Store.",
)
NO_BUCKET = Meaning(
    frozenset({"NoSuchBucket", "ContainerNotFound", "UnknownStoreException"}),
    "there is no such bucket",
    "Create the bucket, or fix the URL.",
)
MEANINGS = (
    FULL_DISK,
    Meaning(
        frozenset(
            {
                "NoCredentialsError",
                "PartialCredentialsError",
                "ProfileNotFound",
                "DefaultCredentialsError",
                "CredentialUnavailableError",
                "NoAuthenticationInformation",
                "NoAuthWithAWSException",
                "NoAwsCredentialsException",
            }
        ),
        "no credentials were found",
        "Set them in the environment of the driver and of the executors, as the plugin of that filesystem reads them "
        "(for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role).",
    ),
    Meaning(
        frozenset({"401"}),
        "the credentials are missing or not valid",
        "Set valid ones in the environment of the driver and of the executors, as the plugin of that filesystem reads "
        "them.",
    ),
    Meaning(
        frozenset(
            {
                "ExpiredToken",
                "ExpiredTokenException",
                "RequestExpired",
                "TokenRefreshRequired",
                "RefreshError",
                "SSOError",
                "TokenRetrievalError",
                "CredentialRetrievalError",
                "LoginError",
            }
        ),
        "the credentials have expired or cannot be renewed",
        "Renew them on the driver and on the executors (with AWS SSO: aws sso login), or use a role, which renews its "
        "own.",
    ),
    Meaning(
        frozenset({"RequestTimeTooSkewed"}),
        "the clock of this machine is wrong",
        "Correct it on the driver and on the executors: servers reject requests whose time differs from their own.",
    ),
    NO_BUCKET,
    Meaning(
        frozenset(
            {
                "403",
                "AccessDenied",
                "AllAccessDisabled",
                "InvalidAccessKeyId",
                "InvalidSecurity",
                "InvalidToken",
                "SignatureDoesNotMatch",
                "AuthenticationFailed",
                "ClientAuthenticationError",
                "AuthorizationFailure",
                "AuthorizationPermissionMismatch",
                "InsufficientAccountPermissions",
                "PublicAccessNotPermitted",
                "AccessDeniedException",
                "AccessControlException",
            }
        ),
        "the credentials do not allow it",
        "Grant them permission to read, write, list and delete there.",
        "Grant them permission to read and list there.",
    ),
    Meaning(
        frozenset(
            {
                "ConnectionError",
                "ConnectionRefusedError",
                "ConnectTimeoutError",
                "ConnectTimeout",
                "EndpointConnectionError",
                "ProxyConnectionError",
                "ProxyError",
                "SSLError",
                "ClientConnectorError",
                "ServiceRequestError",
                "TransportError",
                "gaierror",
                "EHOSTUNREACH",
                "ENETUNREACH",
                "UnknownHostException",
                "ConnectException",
                "ConnectTimeoutException",
                "NoRouteToHostException",
                "SSLException",
                "SSLHandshakeException",
            }
        ),
        "its server cannot be reached",
        "See whether the server runs and this machine reaches it, and fix its address (for S3: AWS_ENDPOINT_URL).",
        may_pass=True,
    ),
    Meaning(
        frozenset(
            {
                "429",
                "503",
                "TimeoutError",
                "ReadTimeoutError",
                "ReadTimeout",
                "ConnectionResetError",
                "ConnectionAbortedError",
                "BrokenPipeError",
                "RequestTimeout",
                "ConnectionClosedError",
                "ServerDisconnectedError",
                "ServiceResponseError",
                "OperationTimedOut",
                "ServerBusy",
                "ServiceUnavailable",
                "SlowDown",
                "SocketTimeoutException",
                "AWSServiceThrottledException",
            }
        ),
        "its server does not answer in time",
        "Check whether the server or the network is overloaded, and run again (for S3, raise AWS_MAX_ATTEMPTS for "
        "more retries).",
        may_pass=True,
    ),
)

_BY_NAME = {name: meaning for meaning in MEANINGS for name in meaning.names}

_PLUGINS = frozenset(
    {
        "adlfs",
        "aiobotocore",
        "aiohttp",
        "azure",
        "botocore",
        "fsspec",
        "gcsfs",
        "google",
        "ocifs",
        "requests",
        "s3fs",
    }
)
"""Packages that fsspec's filesystems consist of or use."""

_ERRNO_IN_TEXT = re.compile(r"\b(?:[Ee]rrno|os error) (\d+)\b")
"""How libraries in Rust and C++ write an errno value that their exceptions do not have as an attribute."""

_JAVA_CLASS = re.compile(r"\b(?:[a-z]\w*\.)+([A-Z]\w*)(?=[:\s]|$)")
_SERVERS_CODE = re.compile(r"(?<![\w/.:-])([A-Z][A-Za-z]{5,})(?![\w/.-])")
_STATUS = re.compile(r"(?:[Ss]tatus [Cc]ode:? |Exception: |\", )(\d{3})\b")
"""Codes and statuses of servers in the text of a Java exception, as Hadoop's filesystems write them; the former are no
part of a path or URL."""


def describe_failure(error: BaseException) -> str:
    """Return why a Store failed and what to do about it; empty if that is unknown or trying again may help."""
    found = _find_meaning(error)
    if found is None or found[0].may_pass:
        return ""
    return _in_words(*found)


def explain_failure(error: BaseException, otherwise: str = "") -> str:
    """Return why a Store failed and what to do about it; for an unknown error, its type and text and ``otherwise``."""
    found = _find_meaning(error)
    if found is None:
        return f"{type(error).__name__}: {_line(error)} {otherwise}".rstrip()
    return _in_words(*found)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error means that the disk of a Store is full, or its quota used up."""
    found = _find_meaning(error)
    return found is not None and found[0] is FULL_DISK


def store_error(what: str, error: BaseException, otherwise: str = "") -> StoreError:
    """Return an error that says what failed, why, and what to do, as :func:`explain_failure` has it.

    Its class is :class:`~sparkdl.errors.StoreFullError` if the disk is full.
    """
    kind = StoreFullError if is_disk_full(error) else StoreError
    return kind(f"{what}: {explain_failure(error, otherwise)}")


def describe_reading_failure(error: BaseException) -> str:
    """Return why a Store could not be read at all and what to do about it; empty if the error may concern one file."""
    found = _find_meaning(error)
    if found is not None:
        return "" if found[0] is FULL_DISK else _in_words(*found, is_reading=True)
    if not _is_of_plugin(error):
        return ""
    return (
        f"its filesystem failed: {type(error).__name__}: {_line(error)} See whether it can be reached from here with "
        "the credentials that are set."
    )


def describe_java_reading_failure(text: str) -> str:
    """Return the same as :func:`describe_reading_failure`, for a Java exception as text: its classes and message."""
    # The last class is that of the innermost exception, whose name says most.
    meaning = _first_meaning(
        [*reversed(_JAVA_CLASS.findall(text)), *_SERVERS_CODE.findall(text), *_STATUS.findall(text)]
    )
    if meaning is None:
        return ""
    return f"{meaning.text}: {_one_line(text)} {meaning.reading_remedy or meaning.remedy}"


@contextmanager
def reading_from(url: str) -> Iterator[None]:
    """Convert the errors of a filesystem in this block to an error that names the URL and says what to do.

    Raises:
        StoreAccessError: in place of an error that is not sparkdl's.
    """
    try:
        yield
    except SparkdlError:
        raise
    except Exception as error:
        why = describe_reading_failure(error) or (
            f"{type(error).__name__}: {_line(error)} See whether the URL is right and can be read from here."
        )
        raise StoreAccessError(f"{url} cannot be read: {why}") from error


def _find_meaning(error: BaseException) -> tuple[Meaning, BaseException] | None:
    """Return the meaning of the first error in the chain of causes that has one, and that error."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        meaning = _first_meaning(_names_of(cause))
        if meaning is not None:
            return meaning, cause
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return None


def _first_meaning(names: Iterable[str]) -> Meaning | None:
    return next((_BY_NAME[name] for name in names if name in _BY_NAME), None)


def _names_of(error: BaseException) -> Iterator[str]:
    """Yield the names that an error can be recognized by: codes first, then classes from the most special one on."""
    if isinstance(error, SparkdlError):
        return  # a lost rank is a ConnectionError, and no failure of a Store
    response = getattr(error, "response", None)
    said = response.get("Error") if isinstance(response, dict) else None  # of botocore
    if isinstance(said, dict):
        yield str(said.get("Code", ""))
    yield str(getattr(response, "status_code", ""))  # of requests
    for attribute in ("error_code", "status_code", "status", "code"):  # of azure, aiohttp and gcsfs
        code = getattr(error, attribute, None)
        if isinstance(code, (str, int)):
            yield str(getattr(code, "value", code))  # azure's codes are members of an enumeration
    if type(error) is OSError and str(error).startswith("Forbidden: "):
        yield "403"  # gcsfs has no class or code for it
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        found = _ERRNO_IN_TEXT.search(str(error))
        number = int(found[1]) if found else None
    if number is not None:
        yield errno.errorcode.get(number, "")
    for kind in type(error).__mro__:
        yield kind.__name__


def _is_of_plugin(error: BaseException) -> bool:
    """Whether an error comes from one of fsspec's filesystems, and is not known to concern only a single file."""
    if isinstance(error, FileNotFoundError):
        return False
    if isinstance(error, OSError) and type(error).__module__ == "builtins":
        return type(error) is not OSError and error.errno is None
    response = getattr(error, "response", None)  # a server's answer about a single file
    return type(error).__module__.partition(".")[0] in _PLUGINS and not isinstance(response, dict)


def _in_words(meaning: Meaning, error: BaseException, *, is_reading: bool = False) -> str:
    remedy = (meaning.reading_remedy if is_reading else "") or meaning.remedy
    return f"{meaning.text}: {type(error).__name__}: {_line(error)} {remedy}"


def _line(error: BaseException) -> str:
    return _one_line(str(error))


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".") + "."
