"""Checks: functions of a module whose names begin with ``check_``. All ranks of one world run them in the same order.

Many checks share a set of rank processes, because starting processes that import torch takes longer than most checks.
A test looks up the outcome of one check by its name.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Outcomes = dict[str, str | None]
"""The failure of each check as text, or None if it passed; see :func:`require`."""

_SKIPPED = "skipped: "


def checks_in(module_name: str) -> list[str]:
    """The checks that a module defines, in the order of the source."""
    return [
        name
        for name, value in vars(importlib.import_module(module_name)).items()
        if name.startswith("check_") and value.__module__ == module_name
    ]


def slow(check: Callable[[], None]) -> Callable[[], None]:
    """Mark a check that only ``make test-slow`` runs."""
    check.is_slow = True  # type: ignore[attr-defined]
    return check


def with_marks(module_name: str) -> list[Any]:
    """The checks of a module as parameters for ``pytest.mark.parametrize``; slow checks carry that mark."""
    checks = vars(importlib.import_module(module_name))
    return [
        pytest.param(name, marks=pytest.mark.slow if hasattr(checks[name], "is_slow") else ())
        for name in checks_in(module_name)
    ]


def chosen(items: Iterable[pytest.Item], module_name: str) -> list[str]:
    """The checks of a module that are among the collected tests of this run."""
    names = [
        item.callspec.params["check"]
        for item in items
        if isinstance(item, pytest.Function)
        and item.module.__name__ == module_name
        and hasattr(item, "callspec")
        and "check" in item.callspec.params
    ]
    return [name for name in checks_in(module_name) if name in names]


def outcome_of(check: Callable[[], None], rank: int) -> str | None:
    """Run a check on this rank; return its failure, or why it was skipped, as text; else None."""
    try:
        check()
    except pytest.skip.Exception as skipped:
        return f"{_SKIPPED}{skipped.msg}"
    except (Exception, pytest.fail.Exception):  # pytest's failure is not an Exception
        return f"rank {rank}:\n{traceback.format_exc()}"
    return None


def require(outcome: str | None) -> None:
    """Pass, fail or skip a test, as its check did on a rank."""
    if outcome is not None and outcome.startswith(_SKIPPED):
        pytest.skip(outcome.removeprefix(_SKIPPED))
    assert outcome is None, outcome


def first_failures(outcomes_of_ranks: Sequence[Outcomes]) -> Outcomes:
    """For each check the failure of the first rank on which it failed; else why it was skipped, or None."""
    return {
        name: min((outcomes[name] for outcomes in outcomes_of_ranks), key=_weight_of)
        for name in outcomes_of_ranks[0]
    }


def _weight_of(outcome: str | None) -> int:
    """The order of outcomes by weight: failures, skipped checks, passed checks."""
    return 2 if outcome is None else int(outcome.startswith(_SKIPPED))
