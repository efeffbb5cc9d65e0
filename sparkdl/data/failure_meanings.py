"""What the errors of filesystems and of their servers mean, by words of theirs, and what to do about each.

A table for :mod:`sparkdl.data.store_failures`, which reads it. The words are those of the local filesystem and of the
libraries behind fsspec's: botocore, google-auth, azure-core and azure-identity, aiohttp.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Meaning:
    """What some errors mean.

    Attributes:
        words: the type and text of the error hold one of them, in small letters; paths and URLs do not count.
        text: what is wrong.
        remedy: what to do.
        reading_remedy: what to do if the Store was only read, where that is something else.
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
    "Create the bucket, or mend the URL.",
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
        "See whether the server runs and this machine reaches it, and mend its address (for S3: AWS_ENDPOINT_URL).",
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
