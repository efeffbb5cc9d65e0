"""``sparkdl bench launch``: the whole command on a few ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow  # a Spark session of its own, and a forkserver beside it
@pytest.mark.timeout(300)
def test_run_measures_launches_with_and_without_spark(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    options = ["--ranks", "2,1", "--seconds", "0.1", "--json", str(path)]
    command = [sys.executable, "-m", "sparkdl.cli", "bench", "launch", *options]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)  # sparkdl's
    report = json.loads(path.read_text())
    found = [(row["case"], row["contender"]) for row in report["rows"]]
    assert found == [(case, way) for case in ("1 rank", "2 ranks") for way in ("without Spark", "on Spark")]
    assert all(row["median_s"] > 0 and row["processor_s"] > 0 for row in report["rows"])
    assert "of a rank" in shown.stdout
