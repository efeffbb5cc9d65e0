from __future__ import annotations

from pathlib import Path

import pytest

import sparkdl as package
from tests.cli.sparkdl_command import sparkdl


def test_version_is_the_package_s(tmp_path: Path) -> None:
    done = sparkdl("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, f"sparkdl {package.__version__}")


def test_help_lists_the_commands(tmp_path: Path) -> None:
    done = sparkdl("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "demo" in done.stdout
    assert "bench" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [(), ("nonsense",), ("bench",), ("demo", "--ranks", "0"), ("demo", "--epochs", "many")],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2_and_the_usage(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = sparkdl(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: sparkdl")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sizes", "nonsense"), "size 'nonsense' is not understood; write it as 512, 16KiB, 4MiB or 1GiB"),
        (("--ranks", "1"), "--ranks 1 is too few to reduce; use 2 or more."),
        (("--against", "rumour"), "--against rumour is unknown; it may be any of gloo, mpi."),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_wrong_benchmark_option_is_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = sparkdl("bench", "allreduce", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (2, f"sparkdl: {message}\n", "")
