"""Runners whose ranks are processes of this machine, forked from a forkserver of an earlier test where possible."""

from __future__ import annotations

import os
from typing import Any

from sparkdl import Runner


def make_runner(**options: Any) -> Runner:
    """Make a Runner with two local ranks, unless the options say otherwise."""
    keep_environment()
    return Runner(**{"num_workers": 2, "local": True, **options})


def keep_environment() -> None:
    """Set the same variables for all tests: a forkserver is reused only for ranks with its environment."""
    os.environ["PYTEST_CURRENT_TEST"] = "any"
    os.environ["OMP_NUM_THREADS"] = "1"
