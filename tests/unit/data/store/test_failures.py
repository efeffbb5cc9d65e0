"""Classification of filesystem errors, whatever the names of the folders in them."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError

from sparkdl.data.files.failures import describe_failure, describe_reading_failure, explain_failure
from sparkdl.data.spark.failures import spark_failures_named
from sparkdl.errors import CorruptFileError, DataError, FileVanishedError, RankLostError, StoreAccessError

MISLEADING = (
    "forbidden",
    "accessdenied",
    "nosuchbucket",
    "quotaexceeded",
    "connection refused",
    "nocredentials",
)
FOOTER_TRACE = """An error occurred: org.apache.spark.SparkException: Encountered error while reading file viewfs://b/x.
\tat org.apache.spark.Something
Caused by: java.lang.RuntimeException: Could not read the footer of the file
\tat org.apache.spark.sql.execution.datasources.parquet.ParquetFooterReader.readFooter(ParquetFooterReader.java:54)
Caused by: {cause}
\tat org.apache.spark.sql.execution.datasources.parquet.ParquetFooterReader.readFooter(ParquetFooterReader.java:54)
"""


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


def test_errors_are_classified_by_class_errno_or_code():
    missing = FileNotFoundError("bucket/x")
    missing.__cause__ = ClientError({"Error": {"Code": "NoSuchBucket", "Message": "?"}}, "ListObjectsV2")
    head = PermissionError("bucket/x")
    head.__cause__ = ClientError({"Error": {"Code": "403", "Message": "Forbidden"}}, "HeadObject")
    for error, meaning in (
        (ClientError({"Error": {"Code": "NoSuchBucket", "Message": "?"}}, "GetObject"), "no such bucket"),
        (ClientError({"Error": {"Code": "AccessDenied", "Message": "?"}}, "GetObject"), "do not allow it"),
        (missing, "no such bucket"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "No"), "cannot be reached"),
        (BrokenPipeError(errno.EPIPE, "No"), "does not answer in time"),
        (type("HttpError", (Exception,), {"code": 401})("Anonymous caller"), "missing or not valid"),
        (head, "do not allow it"),
        (OSError('Forbidden: "https://server/bucket/x"'), "do not allow it"),
        (OSError(f"Can't write '/tmp/{MISLEADING[0]}/x': [Errno 28] No space left"), "its disk is full"),
    ):
        assert meaning in explain_failure(error), repr(error)
    lost = RankLostError("rank 1 is gone")
    lost.__cause__ = lost
    assert describe_failure(lost) == ""


@pytest.mark.parametrize(
    ("cause", "error"),
    [
        ("java.nio.file.AccessDeniedException: s3a://b/x: 403 Forbidden (Service: S3)", StoreAccessError),
        ("java.nio.file.AccessDeniedException: x: o.a.h.NoAuthWithAWSException: none", StoreAccessError),
        ("java.net.UnknownHostException: bucket.s3.test", StoreAccessError),
        ("java.net.SocketException: the wire is cut", DataError),
        ("java.io.IOException: cannot read file:/data/java.net.ConnectException/x", DataError),
        ("org.apache.parquet.io.ParquetDecodingException: x", CorruptFileError),
        ("java.lang.RuntimeException: s3a://b/x is not a Parquet file. Expected", CorruptFileError),
        ("java.io.IOException: FAILED_TO_UNCOMPRESS(5)", CorruptFileError),
        ("java.io.FileNotFoundException: File does not exist: /b/x", FileVanishedError),
        ("java.io.FileNotFoundException: /b/x (Permission denied)", DataError),
        (
            'a.b.AbfsRestOperationException: Operation failed: "No", 403, GET, https://x/y, AuthenticationFailed, "z"',
            StoreAccessError,
        ),
        ("com.google.GoogleJsonResponseException: 403 Forbidden", StoreAccessError),
        ("a.b.AmazonS3Exception: No (Service: S3, Status Code: 403)", StoreAccessError),
        ("java.io.IOException: read 403 of 503 bytes", DataError),
    ],
)
def test_java_trace_is_classified_by_its_last_cause_and_not_by_its_frames(cause, error):
    # The driver has no plugin for this filesystem, and has to believe Spark.
    trace = FOOTER_TRACE.format(cause=cause)
    with pytest.raises(DataError) as caught, spark_failures_named(SimpleNamespace()):
        raise RuntimeError(trace)
    assert type(caught.value) is error, caught.value
    assert ("The file is damaged" in str(caught.value)) == (error is CorruptFileError)
