"""``make`` names missing requirements of a machine before it installs anything, and installs once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USUAL = ("sh", "find", "sed", "head", "touch")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


class Machine:
    """A PATH that contains only the programs added to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in USUAL:
            self.has(name)

    def has(self, name: str, script: str | None = None) -> None:
        """Add the real program, or a script in its place."""
        real = shutil.which(name)
        if script is None and real is None:
            pytest.skip(f"{name} is not installed")
        (self.folder / name).write_text("#!/bin/sh\n" + (script or f'exec {real} "$@"') + "\n")
        (self.folder / name).chmod(0o755)

    def make(
        self, *arguments: str, cwd: Path = ROOT, python: str = sys.executable
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [shutil.which("make"), *arguments, f"PYTHON={python}"],
            cwd=cwd,
            env={"PATH": str(self.folder), "HOME": os.environ.get("HOME", "/")},
            capture_output=True,
            text=True,
            check=False,
            timeout=500,
        )


JAVA_17 = """echo 'openjdk version "17.0.15" 2025-04-15' >&2"""
JAVA_11 = """echo 'openjdk version "11.0.2" 2019-01-15' >&2"""
OLD_COMPILER = """if [ "$1" = -dumpfullversion ]; then echo 9.4.0; else exit 1; fi"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "bin")


def mending_sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The only line of the output that make itself did not print."""
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("make: ")]
    return line


JAVA_PACKAGE = "openjdk-17-jre-headless"


@pytest.mark.parametrize(
    ("programs", "need", "package"),
    [
        ({"c++": None}, "Java 17 or later, found none", JAVA_PACKAGE),
        ({"c++": None, "java": JAVA_11}, "Java 17 or later, found 11", JAVA_PACKAGE),
        ({"java": JAVA_17}, "a C++20 compiler such as GCC 11, found none;", "g++"),
        ({"java": JAVA_17, "c++": OLD_COMPILER}, "a C++20 compiler such as GCC 11, found 9.4.0;", "g++"),
    ],
    ids=["no Java", "old Java", "no compiler", "old compiler"],
)
def test_make_says_which_program_is_missing_or_too_old_and_how_to_install_it(
    machine: Machine, programs: dict[str, str | None], need: str, package: str
) -> None:
    for name, script in programs.items():
        machine.has(name, script)
    line = mending_sentence(machine.make("requirements"))
    assert line.startswith(f"sparkdl needs {need}")
    assert line.endswith(f"fix it with: sudo apt-get install {package}")


def test_make_says_that_python_is_missing(machine: Machine) -> None:
    line = mending_sentence(machine.make("requirements", python=""))
    assert line.startswith("sparkdl needs Python 3.10 to 3.13; ")
    assert "sudo apt-get install python3" in line


@pytest.mark.parametrize("target", ["setup", "demo", "test", "lint"])
def test_every_make_target_checks_requirements_before_it_installs(
    machine: Machine, tmp_path: Path, target: str
) -> None:
    copy = copy_of_what_setup_reads(tmp_path)
    done = machine.make(target, cwd=copy)
    assert mending_sentence(done).startswith("sparkdl needs Java 17")
    assert not (copy / ".venv").exists()


def test_complete_machine_passes(machine: Machine) -> None:
    machine.has("c++")
    machine.has("java", JAVA_17)
    done = machine.make("requirements")
    assert (done.returncode, done.stderr) == (0, "")


def test_setup_installs_once_and_again_when_a_dependency_changed(machine: Machine, tmp_path: Path) -> None:
    copy = copy_of_what_setup_reads(tmp_path)
    planned = machine.make("--dry-run", "setup", cwd=copy)
    assert planned.stdout.count("--editable") == 1, planned.stderr
    stamp = copy / ".venv" / ".installed"
    stamp.parent.mkdir()
    stamp.touch()
    assert "pip install" not in machine.make("--dry-run", "setup", cwd=copy).stdout
    after = time.time() + 10
    os.utime(copy / "pyproject.toml", (after, after))
    assert machine.make("--dry-run", "setup", cwd=copy).stdout.count("--editable") == 1


def test_pre_commit_runs_the_commands_of_make_lint(machine: Machine) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    import yaml

    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    recipe = machine.make("--dry-run", "lint").stdout.splitlines()
    setup = ("pip install", "torchvision_on_cpu")
    lint = [
        line for line in recipe if line.startswith(".venv/bin/") and not any(part in line for part in setup)
    ]
    assert len(lint) == len(hooks)
    for line, hook in zip(lint, hooks, strict=True):
        assert line.startswith(hook["entry"])


def copy_of_what_setup_reads(folder: Path) -> Path:
    copy = folder / "clone"
    copy.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "native", copy / "native")
    return copy
