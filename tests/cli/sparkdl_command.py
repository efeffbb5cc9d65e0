"""Runs the ``sparkdl`` command as users run it: in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def sparkdl(*arguments: str, cwd: Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a command in ``cwd``, without an MLflow server that the environment may name."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    return subprocess.run(
        [sys.executable, "-m", "sparkdl.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        cwd=cwd,
        env={**environment, "PYTHONPATH": str(ROOT)},
    )
