"""Claims: functions of a module whose names begin with ``claim_``, which all ranks of one world run in the same order.

Many share a set of rank processes, as starting processes that import torch takes longer than most checks. A test asks
for the outcome of each by name.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Sequence

import pytest

Outcomes = dict[str, str | None]
"""For each claim how it failed, or None."""


def claims_in(module_name: str) -> list[str]:
    """The claims of a module, in the order in which they are written."""
    return [name for name in vars(importlib.import_module(module_name)) if name.startswith("claim_")]


def outcome_of(claim: Callable[[], None], rank: int) -> str | None:
    """Run a claim on this rank; say how it failed, or None."""
    try:
        claim()
    except (Exception, pytest.fail.Exception):  # the latter is none of the former
        return f"rank {rank}:\n{traceback.format_exc()}"
    return None


def first_failures(outcomes_of_ranks: Sequence[Outcomes]) -> Outcomes:
    """What the first rank on which a claim failed says of it, for each claim."""
    return {
        name: next((outcomes[name] for outcomes in outcomes_of_ranks if outcomes[name] is not None), None)
        for name in outcomes_of_ranks[0]
    }
