"""Checks of ``sparkdl.horovod.torch`` on ranks; see :mod:`tests.checks`.

After a check that failed on some rank, all ranks leave Horovod and join again, so that the next check starts afresh.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

import sparkdl.horovod.torch as hvd
from sparkdl.collective import all_gather_bytes
from tests.checks import Outcomes, checks_in, first_failures, outcome_of
from tests.run_ranks import RankEnvironment, run_ranks


def checks_of(module_names: Sequence[str]) -> list[str]:
    """The names of the checks of modules, as ``module.check``."""
    return [f"{module_name}.{name}" for module_name in module_names for name in checks_in(module_name)]


def run_world(
    module_names: Sequence[str],
    world_size: int,
    prepare: Callable[[RankEnvironment], None] | None = None,
    variables: dict[str, str] | None = None,
) -> Outcomes:
    """Run the checks of modules on new ranks; the outcomes have the names of :func:`checks_of`.

    Args:
        module_names: modules with the checks.
        world_size: number of ranks.
        prepare: function that each rank calls first.
        variables: further environment variables of the ranks.
    """
    return first_failures(run_ranks(world_size, _run_on_rank, module_names, prepare, variables=variables))


@contextmanager
def again_with(**variables: str) -> Iterator[None]:
    """Initialize Horovod with additional environment variables, and after the block again without them."""
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        hvd.init()
        yield
    hvd.shutdown()
    hvd.init()


def _run_on_rank(
    environment: RankEnvironment,
    module_names: Sequence[str],
    prepare: Callable[[RankEnvironment], None] | None,
) -> Outcomes:
    torch.set_num_threads(1)
    if prepare is not None:
        prepare(environment)
    outcomes = {}
    with environment.communicator():
        hvd.init()
        for name in checks_of(module_names):
            module_name, function_name = name.rsplit(".", 1)
            check = getattr(importlib.import_module(module_name), function_name)
            outcomes[name] = outcome_of(check, environment.rank)
            everyones = all_gather_bytes(
                environment.rendezvous,
                key=f"outcomes/{name}",
                rank=environment.rank,
                world_size=environment.world_size,
                value=pickle.dumps(outcomes[name]),
                timeout_s=60.0,
            )
            if any(pickle.loads(outcome) is not None for outcome in everyones):
                hvd.shutdown()
                hvd.init()
        hvd.shutdown()
    return outcomes
