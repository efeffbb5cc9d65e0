"""``sparkdl doctor`` as users run it. Its findings are tested in tests/unit/doctor, tests/hosts and tests/spark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkdl.cli import main
from tests.cli.sparkdl_command import sparkdl


@pytest.mark.slow
def test_server_that_does_not_answer_is_a_finding_in_time_and_the_status_is_1(tmp_path: Path) -> None:
    done = sparkdl(
        "doctor", "--remote", "sc://127.0.0.1:1", "--timeout", "9", "--json", "report.json", cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["FAIL", "Spark", "this", "machine", "no", "session", "on", "sc://127.0.0.1:1:"] in [
        line[:8] for line in lines
    ]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["is_healthy"] is False
    assert report["findings"][-1]["check"] == "Spark"
    assert {"Python", "packages", "shared memory", "ranks"} <= {
        finding["check"] for finding in report["findings"]
    }
    assert done.stdout.splitlines()[-1].startswith("1 of ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "0"), "--ranks must be at least 1, got 0."),
        (("--timeout", "-1"), "--timeout must be positive, got -1"),
        (("--master", "local[2]", "--conf", "nonsense"), "--conf takes KEY=VALUE, got 'nonsense'"),
    ],
)
def test_options_that_cannot_work_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(["doctor", *arguments]) == 2
    assert capsys.readouterr() == ("", f"sparkdl: {message}\n")
