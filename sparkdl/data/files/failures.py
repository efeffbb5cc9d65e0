"""Explains errors of filesystems and of their servers: what they mean for a Store, and what to do.

Runs on the *driver*, on *executors* and on the reader threads of every *rank*.

:data:`MEANINGS` is a table of the words by which errors are recognized. The words are those of the local filesystem
and of the libraries behind fsspec's filesystems: botocore, google-auth, azure-core and azure-identity, aiohttp.
"""

from __future__ import annotations

import errno
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.errors import SparkdlError, StoreAccessError, StoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Meaning:
    """The meaning of a group of errors.

    Attributes:
        words: lower-case words of which the type and text of such an error contain at least one; paths and URLs do not
            count.
        text: what is wrong.
        remedy: what to do.
        reading_remedy: what to do if the Store was only read; empty if that is the same.
        may_pass: whether trying again can help.
    """

    words: tuple[str, ...]
    text: str
    remedy: str
    reading_remedy: str = ""
    may_pass: bool = False


FULL_DISK = Meaning(
    ("no space left", "disk quota exceeded", "errno 28", "quotaexceeded"),
    "its disk is full",
    "Make room there, call Store.cleanup(), or choose another Store.",
)
NO_BUCKET = Meaning(
    ("nosuchbucket", "bucket does not exist", "containernotfound"),
    "there is no such bucket",
    "Create the bucket, or fix the URL.",
)
MEANINGS = (
    FULL_DISK,
    Meaning(
        (
            "nocredentials",
            "unable to locate credentials",
            "could not find credentials",
            "anonymous caller",
            "partialcredentials",
            "profilenotfound",
            "default credentials were not found",
            "credentialunavailable",
            "noauthenticationinformation",
            "must provide either a connection_string",
        ),
        "no credentials were found",
        "Set them in the environment of the driver and of the executors, as the plugin of that filesystem reads them "
        "(for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role).",
    ),
    Meaning(
        (
            "expiredtoken",
            "token has expired",
            "token is expired",
            "request is expired",
            "expired or revoked",
            "invalid_grant",
            "refresherror",
            "reauthentication",
            "ssotoken",
            "ssoerror",
            "sso session",
            "tokenrefreshrequired",
            "tokenretrieval",
            "credentialretrieval",
        ),
        "the credentials have expired or cannot be renewed",
        "Renew them on the driver and on the executors (with AWS SSO: aws sso login), or use a role, which renews its "
        "own.",
    ),
    Meaning(
        ("requesttimetooskewed", "the request time and the current time", "date header too old"),
        "the clock of this machine is wrong",
        "Set it right on the driver and on the executors, as servers take requests of their own time alone.",
    ),
    NO_BUCKET,
    Meaning(
        (
            "accessdenied",
            "access denied",
            "forbidden",
            "invalidaccesskeyid",
            "signaturedoesnotmatch",
            "invalidtoken",
            "invalid credentials",
            "authenticationfailed",
            "failed to authenticate",
            "clientauthentication",
            "authorizationfailure",
            "authorizationpermissionmismatch",
            "publicaccessnotpermitted",
        ),
        "the credentials do not allow it",
        "Grant them reading, writing, listing and deleting there.",
        "Grant them reading and listing there.",
    ),
    Meaning(
        (
            "could not connect to the endpoint",
            "connection refused",
            "connecttimeout",
            "connect timeout",
            "cannot connect to host",
            "name or service not known",
            "name resolution",
            "proxyconnection",
            "ssl validation failed",
            "certificate verify failed",
            "servicerequesterror",
        ),
        "its server cannot be reached",
        "See whether the server runs and this machine reaches it, and fix its address (for S3: AWS_ENDPOINT_URL).",
        may_pass=True,
    ),
    Meaning(
        (
            "readtimeout",
            "timeouterror",
            "requesttimeout",
            "connectionclosed",
            "serverdisconnected",
            "serviceresponseerror",
            "slowdown",
            "slow down",
            "reduce your request rate",
        ),
        "its server does not answer in time",
        "See whether the server or the network to it has too much to do, and begin again (for S3, AWS_MAX_ATTEMPTS "
        "has it try more often).",
        may_pass=True,
    ),
)


# A quoted name with a slash in it, which may hold spaces, or a word with a slash. Names of folders and hosts say
# nothing about what went wrong. Tags and quotes end a word, because errors may hold XML or JSON.
_PATH = re.compile(r"""(?<!\w)(["'])[^"'\n]*/[^"'\n]*\1|[^\s<>"',()]*/[^\s<>"',()]*""")

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


def store_error(message: str) -> StoreError:
    """Return the error with a message that contains a result of the functions above, of the class for its meaning."""
    return StoreFullError(message) if f": {FULL_DISK.text}: " in message else StoreError(message)


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


def describe_reading_words(words: str) -> str:
    """Return the same as :func:`describe_reading_failure`, for an error known only by its class and message as text."""
    meaning = _meaning_of_words(words)
    if meaning is None or meaning is FULL_DISK:
        return ""
    return f"{meaning.text}: {_one_line(words)} {meaning.reading_remedy or meaning.remedy}"


def without_paths(text: str) -> str:
    """Return a text without the paths and URLs in it, so that it can be searched for words."""
    return _PATH.sub(" ", text)


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
    seen: BaseException | None = error
    while seen is not None:
        meaning = _meaning(seen)
        if meaning is not None:
            return meaning, seen
        seen = seen.__cause__ or seen.__context__
    return None


def _meaning(error: BaseException) -> Meaning | None:
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return FULL_DISK
    meaning = _meaning_of_words(f"{type(error).__name__} {_said(error)}")
    if isinstance(error, FileNotFoundError):  # its text may be a bare path
        return meaning if meaning is NO_BUCKET else None
    return meaning


def _meaning_of_words(text: str) -> Meaning | None:
    text = without_paths(text).lower()
    return next((meaning for meaning in MEANINGS if any(word in text for word in meaning.words)), None)


def _is_of_plugin(error: BaseException) -> bool:
    """Whether an error comes from one of fsspec's filesystems, and is not known to concern only a single file."""
    if isinstance(error, FileNotFoundError):
        return False
    if isinstance(error, OSError) and type(error).__module__ == "builtins":
        return type(error) is not OSError and error.errno is None
    response = getattr(error, "response", None)  # a server's answer about a single file
    return type(error).__module__.partition(".")[0] in _PLUGINS and not isinstance(response, dict)


def _said(error: BaseException) -> str:
    """Return the text of an error, without the file names that it has as separate attributes."""
    response = getattr(error, "response", None)  # of botocore
    said = response.get("Error") if isinstance(response, dict) else None
    if isinstance(said, dict):
        return f"{said.get('Code', '')} {said.get('Message', '')}"
    if isinstance(error, OSError) and error.strerror is not None:
        return str(error.strerror)
    return str(error)


def _in_words(meaning: Meaning, error: BaseException, *, is_reading: bool = False) -> str:
    remedy = (meaning.reading_remedy if is_reading else "") or meaning.remedy
    return f"{meaning.text}: {type(error).__name__}: {_line(error)} {remedy}"


def _line(error: BaseException) -> str:
    return _one_line(str(error))


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".") + "."
