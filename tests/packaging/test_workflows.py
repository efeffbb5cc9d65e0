"""The workflows for a public host are valid, and test what the package says that it supports."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".github" / "workflows"


def test_actionlint_finds_no_mistake_in_the_workflows() -> None:
    program = shutil.which("actionlint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("actionlint is not installed")
    done = subprocess.run(
        [program, *sorted(FOLDER.glob("*.yml"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflow_tests_every_python_of_the_classifiers_and_the_oldest_and_newest_spark() -> None:
    matrix = re.findall(r'\{python: "([0-9.]+)", spark: "([0-9.]+)"\}', (FOLDER / "tests.yml").read_text())
    supported = re.findall(r":: Python :: (3\.[0-9]+)", (ROOT / "pyproject.toml").read_text())
    assert {python for python, _ in matrix} == set(supported)
    releases = re.findall(r"^pyspark==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    newest = ".".join(max(releases, key=lambda release: tuple(map(int, release))))
    assert {"3.5", newest} <= {spark for _, spark in matrix}


def test_commands_of_the_workflows_are_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets |= {"test-spark-local", "test-spark-cluster", "test-spark-connect", "test-without-spark"}
    for path in FOLDER.glob("*.yml"):
        for line in re.findall(r"run: make (.*)", path.read_text()):
            words = [word for word in line.split() if "=" not in word and not word.startswith("-")]
            assert set(words) <= targets, path.name
