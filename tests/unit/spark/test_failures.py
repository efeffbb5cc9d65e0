"""The meaning of exceptions of Spark: files that cannot be read, and executors without a usable Python."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sparkdl.errors import CorruptFileError, DataError, FileVanishedError, StoreAccessError
from sparkdl.spark.failures import executor_python_problem, explain_job, spark_failures_named

SPARK = SimpleNamespace(sparkContext=SimpleNamespace(pythonExec="some-python", master="spark://there"))
TRACE = """Job aborted: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "worker.py", line 1, in main
    import {first}
    ^^^^^^
ModuleNotFoundError: No module named '{first}'
{then}
\tat org.apache.spark.api.python.BasePythonRunner
"""
FOOTER_TRACE = """An error occurred: org.apache.spark.SparkException: Encountered error while reading file viewfs://b/x.
\tat org.apache.spark.Something
Caused by: java.lang.RuntimeException: Could not read the footer of the file
\tat org.apache.spark.sql.execution.datasources.parquet.ParquetFooterReader.readFooter(ParquetFooterReader.java:54)
Caused by: {cause}
\tat org.apache.spark.sql.execution.datasources.parquet.ParquetFooterReader.readFooter(ParquetFooterReader.java:54)
"""


@pytest.mark.parametrize("module", ["sparkdl", "sparkdl.data.newer", "pyarrow", "torch"])
def test_module_that_the_executors_lack_is_named_with_pyspark_python(module: str) -> None:
    for text in (
        TRACE.format(first=module, then=""),
        f"some-python: Error while finding module specification (ModuleNotFoundError: No module named '{module}')",
        f"Error from python worker:\n  Traceback (most recent call last):\n    File\n  ModuleNotFoundError: "
        f"No module named '{module}'",
    ):
        problem = executor_python_problem(RuntimeError(text), SPARK)
        assert f"which has no module {module!r}" in problem
        assert "PYSPARK_PYTHON" in problem


def test_missing_module_of_the_user_is_to_be_shipped_with_add_py_file() -> None:
    problem = executor_python_problem(RuntimeError(TRACE.format(first="my_features", then="")), SPARK)
    assert "imports 'my_features'" in problem
    assert "addPyFile" in problem
    assert "PYSPARK_PYTHON" not in problem


def test_only_the_last_exception_of_a_traceback_counts() -> None:
    then = (
        "\nDuring handling of the above exception, another exception occurred:\n\nTraceback (most recent call last):\n"
        '  File "worker.py", line 3, in main\n    raise ValueError\nValueError: no fallback'
    )
    for module in ("my_features", "torch"):
        assert not executor_python_problem(RuntimeError(TRACE.format(first=module, then=then)), SPARK)


@pytest.mark.parametrize(
    ("cause", "error"),
    [
        ("java.nio.file.AccessDeniedException: s3a://b/x: 403 Forbidden (Service: S3)", StoreAccessError),
        ("java.nio.file.AccessDeniedException: x: o.a.h.NoAuthWithAWSException: none", StoreAccessError),
        ("java.net.UnknownHostException: bucket.s3.test", StoreAccessError),
        ("java.net.SocketException: the wire is cut", DataError),
        ("java.io.IOException: cannot read file:/data/java.net.ConnectException/x", DataError),
        ("org.apache.parquet.io.ParquetDecodingException: x", CorruptFileError),
        ("java.io.FileNotFoundException: File does not exist: /b/x", FileVanishedError),
        ("java.io.FileNotFoundException: /b/x (No such file or directory)", FileVanishedError),
        ("java.io.FileNotFoundException: /b/x (Permission denied)", DataError),
        ("java.io.FileNotFoundException: /b/x (Too many open files)", DataError),
        ("com.google.GoogleJsonResponseException: 403 Forbidden", DataError),
        ("a.b.AmazonS3Exception: No (Service: S3, Status Code: 403)", DataError),
        (
            "a.b.AmazonS3Exception: No (Service: S3; Status Code: 403; Error Code: ExpiredToken; Request ID: 1)",
            StoreAccessError,
        ),
        ("java.io.IOException: read 403 of 503 bytes", DataError),
    ],
)
def test_java_trace_is_classified_by_its_last_cause_and_not_by_its_frames(cause, error):
    trace = FOOTER_TRACE.format(cause=cause)
    with pytest.raises(DataError) as caught, spark_failures_named(SPARK):
        raise RuntimeError(trace)
    assert type(caught.value) is error, caught.value
    assert ("damaged. Write it again" in str(caught.value)) == (error is CorruptFileError)


def test_what_code_on_an_executor_says_is_neither_a_loss_nor_a_cancellation() -> None:
    said = "ValueError: the order was cancelled, and executor 1 lost it"
    raised_there = type("PythonException", (RuntimeError,), {})(said)
    assert explain_job(raised_there, SPARK, "sparkdl") is None
