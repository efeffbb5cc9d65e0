"""Elastic runs of a Connect client that executors cannot reach are coordinated by a task of Spark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spark.launch.unreachable_driver import STEPS

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.about_connect, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    # Remove the variables that the tests' own session has set for its server.
    environment = {name: value for name, value in os.environ.items() if "SPARK" not in name}
    folder = tmp_path_factory.mktemp("unreachable")
    environment |= {
        "SPARK_TESTING": "1",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SPARKDL_STORE": str(folder / "store"),
    }
    program = subprocess.run(
        [sys.executable, "-m", "tests.spark.launch.unreachable_driver", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert program.returncode == 0, program.stderr
    return json.loads(program.stdout.splitlines()[-1]), program.stderr


def test_a_run_whose_coordinating_task_is_lost_continues_from_the_last_commit(
    ended: tuple[dict[str, Any], str],
) -> None:
    outcomes, log = ended
    assert outcomes["lose both"][0]["began_with"] > 0
    assert "The executors cannot reach this machine, so a task coordinates the ranks" in log
    assert (
        "The run continues from its last checkpoint, or without one from the beginning: restart 1 of 3."
        in log
    )


def test_a_run_that_then_loses_a_rank_continues_with_the_others(ended: tuple[dict[str, Any], str]) -> None:
    outcomes, log = ended
    values = outcomes["lose both"]
    assert [value["total"] for value in values] == [STEPS] * values[0]["size"]
    assert "without member" in log
    assert f"ends with {STEPS}" in log


def test_an_exception_of_the_users_code_is_the_cause_of_the_error(ended: tuple[dict[str, Any], str]) -> None:
    kind, text, cause = ended[0]["raise"]
    assert kind == "RankError"
    assert "ValueError: of the user" in text
    assert cause == "ValueError('of the user')"
