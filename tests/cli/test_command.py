from __future__ import annotations

import re
from pathlib import Path

import pytest

import sparkdl as package
from sparkdl.cli import main
from sparkdl.cli.demo import judge
from tests.cli.sparkdl_command import sparkdl


def test_version_is_the_package_s(tmp_path: Path) -> None:
    done = sparkdl("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, f"sparkdl {package.__version__}")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "demo" in shown
    assert "bench" in shown


@pytest.mark.parametrize(
    "arguments",
    [(), ("nonsense",), ("bench",), ("demo", "--epochs", "many")],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2_and_the_usage(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: sparkdl")


def test_every_command_has_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("demo", "run", "job-script", "job-schema", "bench", "bench feed"):
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        assert re.search(r"\n\n[A-Z].*[.:]\n\n", capsys.readouterr().out, re.DOTALL), command


def test_wrong_benchmark_option_ends_with_2_and_one_line(tmp_path: Path) -> None:
    done = sparkdl("bench", "allreduce", "--sizes", "nonsense", cwd=tmp_path)
    message = "size 'nonsense' is not understood; write it as 512, 16KiB, 4MiB or 1GiB"
    assert (done.returncode, done.stderr, done.stdout) == (2, f"sparkdl: {message}\n", "")


def test_accuracy_of_the_demo_below_97_percent_is_reported_and_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert judge(0.98, 0.96) == 1
    assert capsys.readouterr().err.startswith("sparkdl: an accuracy of 0.9600 is too low, at least 0.97")
    assert judge(0.97, 0.97) == 0
    assert capsys.readouterr().err == ""
