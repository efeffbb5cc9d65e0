"""The workflows for a public host are valid, and test what the package says that it supports."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

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


def test_pinned_versions_that_are_installed_here_admit_each_python_of_their_line() -> None:
    pythons = re.findall(r":: Python :: (3\.[0-9]+)", (ROOT / "pyproject.toml").read_text())
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if not line.startswith("#")]
    installed = {dist.name.lower(): dist for dist in metadata.distributions()}
    num_checked, refused = 0, []
    for requirement in pinned:
        dist = installed.get(requirement.name.lower())
        if dist is None or dist.version not in requirement.specifier:
            continue
        num_checked += 1
        admitted = SpecifierSet(dist.metadata.get("Requires-Python") or "")
        for python in pythons:
            # The newest patch release, as a package may need a later one than the first.
            full = f"{python}.99"
            environment = {**default_environment(), "python_version": python, "python_full_version": full}
            if (
                requirement.marker is None or requirement.marker.evaluate(environment)
            ) and full not in admitted:
                refused.append(f"{requirement} needs Python {admitted}, not {python}")
    assert num_checked > 200
    assert refused == []


def test_commands_of_the_workflows_are_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets |= {"test-spark-local", "test-spark-cluster", "test-spark-connect", "test-without-spark"}
    for path in FOLDER.glob("*.yml"):
        for line in re.findall(r"run: make (.*)", path.read_text()):
            words = [word for word in line.split() if "=" not in word and not word.startswith("-")]
            assert set(words) <= targets, path.name


def test_address_of_the_project_is_in_all_places_or_in_none() -> None:
    is_missing = {"HOST/REPOSITORY" in (ROOT / name).read_text() for name in ("README.md", "docs/index.md")}
    has_urls = "[project.urls]" in (ROOT / "pyproject.toml").read_text()
    assert is_missing == {not has_urls}
