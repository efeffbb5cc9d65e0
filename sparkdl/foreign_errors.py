"""What the exceptions of other libraries mean: one table from classes and codes to sparkdl's errors.

Runs on the *driver*, on *executors* and on the reader threads of every *rank*.

An exception is recognized by the names of its classes, by its errno value and by the code in a server's answer, not by
its message nor by the HTTP status of a server. There are two exceptions to this: gcsfs raises a plain ``OSError`` with
"Forbidden: " in place of a code, and libraries in Rust and C++ have errno values only in their messages. The names in
:data:`MEANINGS` are those of the local filesystem, of the libraries behind fsspec's filesystems (botocore, google-auth,
azure-core and azure-identity, aiohttp, requests), of MLflow's server, and of Hadoop's filesystems, Parquet and Spark,
whose exceptions reach Python as text. An exception that is not in the table keeps its own words, and becomes the
general error of the caller.
"""

from __future__ import annotations

import errno
import re
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.errors import (
    CorruptFileError,
    FileVanishedError,
    LaunchCancelledError,
    ParamError,
    SparkdlError,
    StoreAccessError,
    StoreError,
    StoreFullError,
    list_names,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mlflow.exceptions import MlflowException


@dataclass(frozen=True)
class Meaning:
    """The meaning of a group of exceptions.

    Attributes:
        error: class of the error to raise for them.
        text: what is wrong.
        remedy: what to do.
        names: names of exception classes, errno values, codes of servers, and error conditions of Spark.
        may_pass: whether trying again can help.
        is_final: whether no permission and no setting of a server could change it.
    """

    error: type[SparkdlError]
    text: str
    remedy: str
    names: frozenset[str]
    may_pass: bool = False
    is_final: bool = False


_ON_ALL = "in the environment of the driver and of the executors"

MEANINGS = (
    Meaning(
        StoreFullError,
        "its disk is full",
        "Make room there, call Store.cleanup(), or choose another Store.",
        frozenset(
            {"ENOSPC", "EDQUOT", "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"}
        ),
    ),
    Meaning(
        StoreAccessError,
        "no credentials were found",
        f"Set them {_ON_ALL}, as the plugin of that filesystem reads them (for S3: AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, a profile, or a role).",
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
    ),
    Meaning(
        StoreAccessError,
        "the credentials have expired or cannot be renewed",
        "Renew them on the driver and on the executors (with AWS SSO: aws sso login), or use a role, which renews its "
        "own.",
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
    ),
    Meaning(
        StoreAccessError,
        "the clock of this machine is wrong",
        "Correct it on the driver and on the executors: servers reject requests whose time differs from their own.",
        frozenset({"RequestTimeTooSkewed"}),
    ),
    Meaning(
        StoreAccessError,
        "there is no such bucket",
        "Create the bucket, or fix the URL.",
        frozenset({"NoSuchBucket", "ContainerNotFound", "UnknownStoreException"}),
    ),
    Meaning(
        StoreAccessError,
        "the credentials do not allow it",
        "Grant them permission to read and list there, and to write and delete if it is a Store.",
        frozenset(
            {
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
    ),
    Meaning(
        StoreAccessError,
        "its server cannot be reached, or does not answer in time",
        "See whether the server runs, this machine reaches it and its address is right (for S3: AWS_ENDPOINT_URL). If "
        "it is overloaded, run again (for S3, raise AWS_MAX_ATTEMPTS for more retries).",
        frozenset(
            {
                # Of Python and of the libraries of HTTP, also as bases of others.
                "ConnectionError",
                "TimeoutError",
                "gaierror",
                "EHOSTUNREACH",
                "ENETUNREACH",
                "HTTPClientError",
                "ReadTimeout",
                "ClientConnectorError",
                "ServerDisconnectedError",
                "ServiceRequestError",
                "ServiceResponseError",
                "TransportError",
                # Codes of servers.
                "OperationTimedOut",
                "RequestTimeout",
                "ServerBusy",
                "ServiceUnavailable",
                "SlowDown",
                # Of Java and Hadoop.
                "AWSServiceThrottledException",
                "ConnectException",
                "ConnectTimeoutException",
                "NoRouteToHostException",
                "SSLError",
                "SSLException",
                "SSLHandshakeException",
                "SocketTimeoutException",
                "UnknownHostException",
            }
        ),
        may_pass=True,
    ),
    Meaning(
        FileVanishedError,
        "the file is no longer there",
        "Create the DataFrame again.",
        frozenset({"FAILED_READ_FILE.FILE_NOT_EXIST", "SparkFileNotFoundException", "FileNotFoundException"}),
    ),
    Meaning(
        CorruptFileError,
        "the file is damaged",
        "Write it again.",
        frozenset({"FAILED_READ_FILE.CANNOT_READ_FILE_FOOTER", "ParquetDecodingException"}),
    ),
    # BAD_REQUEST is not among MLflow's refusals, as MLflow also returns it if its database is gone.
    Meaning(
        ParamError,
        "MLflow takes no such name or value",
        "Choose another one.",
        frozenset(
            {
                "MlflowException.INVALID_PARAMETER_VALUE",
                "MlflowException.INVALID_STATE",
                "MlflowException.RESOURCE_ALREADY_EXISTS",
            }
        ),
        is_final=True,
    ),
    Meaning(
        SparkdlError,
        "MLflow does not allow it, or does not have it",
        "Have it allowed or made on the server.",
        frozenset(
            {
                "MlflowException.FEATURE_DISABLED",
                "MlflowException.PERMISSION_DENIED",
                "MlflowException.RESOURCE_DOES_NOT_EXIST",
                "MlflowException.RESOURCE_LIMIT_EXCEEDED",
            }
        ),
    ),
    Meaning(
        LaunchCancelledError,
        "the job was cancelled in Spark",
        "Run it again.",
        frozenset({"SPARK_JOB_CANCELLED", "OPERATION_CANCELED"}),
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


def first_meaning(names: Iterable[str]) -> Meaning | None:
    """Return the meaning of the first name that is in the table; None if none of them is."""
    return next((_BY_NAME[name] for name in names if name in _BY_NAME), None)


def mlflow_refusal(error: MlflowException) -> Meaning | None:
    """Return why MLflow's server refused a request, by its error code.

    None if the code is not in the table: the server may accept the request later.
    """
    return first_meaning([f"MlflowException.{error.error_code}"])


def explain_failure(error: BaseException, otherwise: str = "") -> str:
    """Return what an exception means and what to do; for an unknown one, its type and text and ``otherwise``."""
    meaning, source = _find_meaning(error)
    if meaning is None:
        return f"{type(error).__name__}: {one_line(error)} {otherwise}".rstrip()
    return f"{meaning.text}: {type(source).__name__}: {one_line(source)} {meaning.remedy}"


def describe_lasting_failure(error: BaseException) -> str:
    """Return the same for an exception whose cause stays when the caller tries again; empty for all others."""
    meaning, _ = _find_meaning(error)
    return "" if meaning is None or meaning.may_pass else explain_failure(error)


def is_disk_full(error: BaseException) -> bool:
    """Whether an exception means that the disk of a Store is full, or its quota used up."""
    meaning, _ = _find_meaning(error)
    return meaning is not None and meaning.error is StoreFullError


def store_error(what: str, error: BaseException, otherwise: str = "") -> StoreError:
    """Return an error that says what failed, why, and what to do, as :func:`explain_failure` has it.

    Its class is :class:`~sparkdl.errors.StoreFullError` if the disk is full.
    """
    kind = StoreFullError if is_disk_full(error) else StoreError
    return kind(f"{what}: {explain_failure(error, otherwise)}")


@contextmanager
def _convert_errors(
    convert: Callable[[Exception], SparkdlError], of: type[Exception] = Exception
) -> Iterator[None]:
    """Raise other code's exceptions of a class in this block as the errors that a function makes of them."""
    try:
        yield
    except SparkdlError:
        raise
    except of as error:
        raise convert(error) from error


def as_utf8(text: str) -> str:
    """Return a text that the native core takes: errors may hold lone surrogates, such as those of file names."""
    return text.encode(errors="backslashreplace").decode()


def errors_as(
    kind: type[SparkdlError], what: str, advice: str = "", *, of: type[Exception] = Exception
) -> AbstractContextManager[None]:
    """Convert the exceptions of other code in this block, such as a function of the user, to an error of sparkdl's.

    Args:
        kind: class of the error.
        what: clause that says what failed.
        advice: sentences that say what to do about it.
        of: class of the exceptions that are converted; others pass.

    Raises:
        SparkdlError: of that class, with the exception's type and text, in place of an error that is not sparkdl's.
    """

    def convert(error: Exception) -> SparkdlError:
        text = f"{what}: {type(error).__name__}: {error}"
        return kind(f"{text.rstrip('.')}. {advice}" if advice else text)

    return _convert_errors(convert, of)


def needing(
    what: str, extra: str, *packages: str, kind: type[SparkdlError] = ParamError
) -> AbstractContextManager[None]:
    """Convert an ``ImportError`` of optional packages in this block to an error that says what to install.

    Args:
        what: what needs the packages.
        extra: extra of sparkdl that has them.
        packages: requirements of pip.
        kind: class of the error.

    Raises:
        SparkdlError: of that class, in place of an ``ImportError``.
    """
    return errors_as(
        kind, f"{what} needs {list_names(packages)}", how_to_install(extra, *packages), of=ImportError
    )


def how_to_install(extra: str, *packages: str) -> str:
    """Return the sentence of an error about optional packages that are not installed."""
    return f"Run pip install {' '.join(packages)}, or install sparkdl with its extra {extra!r}."


def store_errors(what: str, otherwise: str = "") -> AbstractContextManager[None]:
    """Convert the errors of a filesystem in this block by :func:`store_error`.

    Raises:
        StoreError: in place of an error that is not sparkdl's.
    """
    return _convert_errors(lambda error: store_error(what, error, otherwise))


def describe_reading_failure(error: BaseException) -> str:
    """Return why a Store could not be read at all and what to do; empty if the exception may concern one file."""
    meaning, _ = _find_meaning(error)
    if meaning is not None:
        return explain_failure(error) if meaning.error is StoreAccessError else ""
    if not _is_of_plugin(error):
        return ""
    return (
        f"its filesystem failed: {type(error).__name__}: {one_line(error)} See whether it can be reached from here "
        "with the credentials that are set."
    )


def reading_from(url: str) -> AbstractContextManager[None]:
    """Convert the errors of a filesystem in this block to an error that names the URL and says what to do.

    Raises:
        StoreAccessError: in place of an error that is not sparkdl's.
    """

    def convert(error: Exception) -> StoreAccessError:
        why = describe_reading_failure(error) or (
            f"{type(error).__name__}: {one_line(error)} See whether the URL is right and can be read from here."
        )
        return StoreAccessError(f"{url} cannot be read: {why}")

    return _convert_errors(convert)


def one_line(error: BaseException | str) -> str:
    """Return the text of an exception as one line that ends in a full stop."""
    return " ".join(str(error).split()).rstrip(".") + "."


def _find_meaning(error: BaseException) -> tuple[Meaning | None, BaseException]:
    """Return the meaning of the first exception in the chain of causes that has one, and that exception."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        meaning = first_meaning(_names_of(cause))
        if meaning is not None:
            return meaning, cause
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return None, error


def _names_of(error: BaseException) -> Iterator[str]:
    """Yield the names that an exception can be recognized by: codes, then its classes from the most special one on."""
    if isinstance(error, SparkdlError):
        return  # a lost rank is a ConnectionError, and no failure of a Store
    response = getattr(error, "response", None)
    answer = response.get("Error") if isinstance(response, dict) else None  # of botocore
    if isinstance(answer, dict):
        yield str(answer.get("Code", ""))
    code = getattr(
        error, "error_code", None
    )  # of azure, whose codes are strings or members of an enumeration
    yield str(getattr(code, "value", code))
    if type(error) is OSError and str(error).startswith("Forbidden: "):
        yield "AccessDenied"  # gcsfs raises a plain OSError, as Arrow does for a damaged file
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        match = _ERRNO_IN_TEXT.search(str(error))
        number = int(match[1]) if match else None
    if number is not None:
        yield errno.errorcode.get(number, "")
    for kind in type(error).__mro__:
        yield kind.__name__


def _is_of_plugin(error: BaseException) -> bool:
    """Whether an exception comes from one of fsspec's filesystems, and is not known to concern only a single file."""
    if isinstance(error, FileNotFoundError):
        return False
    if isinstance(error, OSError) and type(error).__module__ == "builtins":
        return type(error) is not OSError and error.errno is None
    response = getattr(error, "response", None)  # a server's answer about a single file
    return type(error).__module__.partition(".")[0] in _PLUGINS and not isinstance(response, dict)
