"""Runs checks of ``torch.distributed`` on ranks; see :mod:`tests.checks`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import torch

import sparkdl.torch
from tests.checks import Outcomes, checks_in, first_failures, outcome_of
from tests.run_ranks import RankEnvironment, run_ranks


def run_checks(
    module_names: Sequence[str],
    world_size: int,
    *,
    transport: str = "auto",
    names: Sequence[str] | None = None,
) -> Outcomes:
    """Run the checks of modules on new ranks with a process group; names of checks must be unique.

    Args:
        module_names: modules that define the checks.
        world_size: number of ranks to start.
        transport: transport of the ranks' communicator.
        names: names of the checks to run; all of them when None.
    """
    checks = [
        getattr(importlib.import_module(module_name), name)
        for module_name in module_names
        for name in checks_in(module_name)
        if names is None or name in names
    ]
    return first_failures(run_ranks(world_size, _run_on_rank, checks, transport=transport))


def _run_on_rank(environment: RankEnvironment, checks: Sequence[Callable[[], None]]) -> Outcomes:
    torch.set_num_threads(1)
    with environment.communicator() as communicator:
        sparkdl.torch.init_process_group(communicator, timeout_s=120.0)
        outcomes = {check.__name__: outcome_of(check, communicator.rank) for check in checks}
        sparkdl.torch.destroy_process_group()
    return outcomes
