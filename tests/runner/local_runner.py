"""Runners whose ranks are processes of this machine, forked from what an earlier test has had imported."""

from __future__ import annotations

import os
from typing import Any

from sparkdl import Runner


def make_runner(**options: Any) -> Runner:
    """A Runner of two local ranks, unless the options say otherwise."""
    keep_environment()
    return Runner(**{"num_workers": 2, "local": True, **options})


def keep_environment() -> None:
    """Have variables the same for all tests: a rank is forked only from a process that has those of the rank."""
    os.environ["PYTEST_CURRENT_TEST"] = "any"
    os.environ["OMP_NUM_THREADS"] = "1"
