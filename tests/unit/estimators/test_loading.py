"""Modules that an estimator loads on the driver: none of those that only ranks need."""

from __future__ import annotations

import subprocess
import sys

MOST_MODULES = 169

PROGRAM = """
import sys
from sparkdl.estimators import TorchEstimator
print(*(name for name in sys.modules if name.partition(".")[0] == "sparkdl"))
"""


def test_an_estimator_loads_neither_the_loop_nor_the_c10d_backend() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not {"sparkdl.training.trainer", "sparkdl.torch", "sparkdl.data.petastorm"} & loaded
    assert len(loaded) <= MOST_MODULES
