"""The meaning of exceptions, whatever the names of the folders in them."""

from __future__ import annotations

import ast
import errno
import re
import sys
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ErrorCode

import sparkdl
from sparkdl.errors import DataError, ParamError, RankLostError
from sparkdl.foreign_errors import (
    MEANINGS,
    describe_lasting_failure,
    describe_reading_failure,
    explain_failure,
    mlflow_refusal,
    needing,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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


def test_error_about_a_missing_package_names_what_needs_it_and_the_extra():
    with (
        pytest.raises(
            DataError,
            match=r"^Part needs absent, other: ModuleNotFoundError: .*'absent'\. Run pip install absent other, "
            r"or install sparkdl with its extra 'rest'\.$",
        ),
        needing("Part", "rest", "absent", "other", kind=DataError),
    ):
        raise ModuleNotFoundError("No module named 'absent'")
    with pytest.raises(KeyError), needing("Part", "rest", "absent"):
        raise KeyError("other errors pass")
    with pytest.raises(ParamError, match="mine"), needing("Part", "rest", "absent"):
        raise ParamError("mine")


def test_extras_that_errors_name_have_the_packages_that_they_name():
    root = Path(sparkdl.__file__).parent
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = {
        extra: {re.split(r"[ ;<>]", requirement)[0].partition("==")[0] for requirement in requirements}
        for extra, requirements in project["optional-dependencies"].items()
    }
    extras["train"] |= extras["jobs"] | extras["data"] | extras["torch"] | extras["spark"]
    named: dict[str, set[str]] = {}
    for file in [*root.rglob("*.py"), *(root / "estimators").resolve().rglob("*.py")]:
        text = file.read_text()
        if file.name == "foreign_errors.py" or not re.search(r"\b(needing|how_to_install)\(", text):
            continue
        for call in ast.walk(ast.parse(text)):
            name = getattr(call.func, "id", None) if isinstance(call, ast.Call) else None
            if name in ("needing", "how_to_install"):
                extra, *packages = call.args[1:] if name == "needing" else call.args
                words = {word.value.partition("==")[0] for word in packages if isinstance(word, ast.Constant)}
                named.setdefault(extra.value, set()).update(words)
    assert {"metrics", "delta", "onnx", "lora", "plot", "monitor", "mpi", "s3"} <= set(named)
    assert {extra: packages for extra, packages in named.items() if not packages <= extras[extra]} == {}
