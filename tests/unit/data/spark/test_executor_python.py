"""Which failures of a job are caused by the executors' Python."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sparkdl.data.spark.executor_python import executor_python_problem

SPARK = SimpleNamespace(sparkContext=SimpleNamespace(pythonExec="some-python", master="spark://there"))
TRACE = """Job aborted: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "worker.py", line 1, in main
    import {first}
    ^^^^^^
ModuleNotFoundError: No module named '{first}'
{then}
\tat org.apache.spark.api.python.BasePythonRunner
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
