"""What a filesystem's error means for somebody who writes to a Store. Runs on the *driver* and on *executors*."""

from __future__ import annotations

import errno

_FULL = {errno.ENOSPC, errno.EDQUOT}
_MEANINGS = (
    (("no space left", "disk quota exceeded", "errno 28", "quotaexceeded"), "its disk is full"),
    (
        ("nocredentials", "unable to locate credentials", "could not find credentials", "anonymous caller"),
        "no credentials were found",
    ),
    (("nosuchbucket", "bucket does not exist", "containernotfound"), "there is no such bucket"),
    (
        ("accessdenied", "forbidden", "invalidaccesskeyid", "signaturedoesnotmatch"),
        "the credentials do not allow it",
    ),
)
_REMEDIES = {
    "its disk is full": "Make room there, call Store.cleanup(), or choose another Store.",
    "no credentials were found": "Set them in the environment of the driver and of the executors, as the plugin of "
    "that filesystem reads them (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role).",
    "there is no such bucket": "Create the bucket, or mend the URL.",
    "the credentials do not allow it": "Grant them reading, writing, listing and deleting there.",
}


def describe_failure(error: BaseException) -> str:
    """Return why a Store failed and what to do about it; empty for what may go away when tried again."""
    seen: BaseException | None = error
    while seen is not None:
        meaning = _meaning(seen)
        if meaning:
            return f"{meaning}: {type(seen).__name__}: {seen}. {_REMEDIES[meaning]}"
        seen = seen.__cause__ or seen.__context__
    return ""


def _meaning(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in _FULL:
        return "its disk is full"
    text = f"{type(error).__name__} {error}".lower()
    return next((meaning for words, meaning in _MEANINGS if any(word in text for word in words)), "")
