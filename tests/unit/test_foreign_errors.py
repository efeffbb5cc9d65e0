"""The meaning of exceptions, whatever the names of the folders in them."""

from __future__ import annotations

import errno

import pytest
from botocore.exceptions import ClientError
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ErrorCode

from sparkdl.errors import RankLostError
from sparkdl.foreign_errors import (
    MEANINGS,
    describe_lasting_failure,
    describe_reading_failure,
    explain_failure,
    mlflow_refusal,
)

MISLEADING = (
    "forbidden",
    "accessdenied",
    "nosuchbucket",
    "quotaexceeded",
    "connection refused",
    "nocredentials",
)


@pytest.mark.parametrize("word", MISLEADING)
def test_paths_in_an_error_do_not_affect_its_classification(word):
    path = f"bucket/{word}/x.parquet"
    for error in (
        FileNotFoundError(errno.ENOENT, "No such file or directory", f"/{path}"),
        FileNotFoundError(
            errno.ENOENT, f"Failed to open local file '/tmp/{path}'. Detail: [errno 2] No such file"
        ),
        PermissionError(errno.EACCES, "Permission denied", f"/{path}"),
        FileNotFoundError(path),
        OSError(f"Cannot open '/tmp/{path}': it doesn't end"),
        OSError(f'Cannot open "s3://{path}"'),
        ClientError({"Error": {"Code": "NoSuchKey", "Message": "No such key", "Key": path}}, "GetObject"),
    ):
        assert describe_reading_failure(error) == "", repr(error)


def test_a_name_has_one_meaning():
    names = [name for meaning in MEANINGS for name in meaning.names]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("code", "is_final"),
    [("INVALID_PARAMETER_VALUE", True), ("PERMISSION_DENIED", False), ("BAD_REQUEST", None)],
)
def test_codes_of_mlflow_say_whether_a_refusal_is_final(code, is_final):
    refusal = mlflow_refusal(MlflowException("No.", ErrorCode.Value(code)))
    assert (None if refusal is None else refusal.is_final) is is_final


def test_errors_are_classified_by_class_errno_or_code():
    missing = FileNotFoundError("bucket/x")
    missing.__cause__ = ClientError({"Error": {"Code": "NoSuchBucket", "Message": "?"}}, "ListObjectsV2")
    for error, meaning in (
        (ClientError({"Error": {"Code": "NoSuchBucket", "Message": "?"}}, "GetObject"), "no such bucket"),
        (ClientError({"Error": {"Code": "AccessDenied", "Message": "?"}}, "GetObject"), "do not allow it"),
        (missing, "no such bucket"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "No"), "cannot be reached, or does not answer"),
        (BrokenPipeError(errno.EPIPE, "No"), "cannot be reached, or does not answer"),
        (OSError('Forbidden: "https://server/bucket/x"'), "do not allow it"),
        (OSError(f"Can't write '/tmp/{MISLEADING[0]}/x': [Errno 28] No space left"), "its disk is full"),
    ):
        assert meaning in explain_failure(error), repr(error)
    lost = RankLostError("rank 1 is gone")
    lost.__cause__ = lost
    assert describe_lasting_failure(lost) == ""


def test_status_of_a_server_is_passed_on_and_not_interpreted():
    head = PermissionError("bucket/x")
    head.__cause__ = ClientError({"Error": {"Code": "403", "Message": "Forbidden"}}, "HeadObject")
    unavailable = type("HttpError", (Exception,), {"code": 503, "__module__": "gcsfs.retry"})(
        "Try later, 503"
    )
    for error in (head, unavailable):
        assert explain_failure(error, "Look.") == f"{type(error).__name__}: {error}. Look."
        assert describe_reading_failure(error).startswith("its filesystem failed: ")
