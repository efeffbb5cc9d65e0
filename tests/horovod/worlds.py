"""Claims about ``sparkdl.horovod.torch`` on running ranks: modules of functions that begin with ``claim_``.

All ranks run the claims in one order. After one that failed on some rank, all of them leave Horovod and join again, so
that the next begins afresh.
"""

from __future__ import annotations

import importlib
import pickle
import traceback
from collections.abc import Callable, Sequence

import pytest
import torch

import sparkdl.horovod.torch as hvd
from sparkdl.collective import all_gather_bytes
from tests.run_ranks import RankEnvironment, run_ranks


def claims_of(module_names: Sequence[str]) -> list[str]:
    """The claims of modules, as ``module.claim``, in the order in which they are written."""
    return [
        f"{module_name}.{name}"
        for module_name in module_names
        for name in vars(importlib.import_module(module_name))
        if name.startswith("claim_")
    ]


def run_world(module_names: Sequence[str], world_size: int) -> dict[str, str | None]:
    """Run the claims of modules on new ranks; say for each how it failed, or None."""
    outcomes = run_ranks(world_size, _run_on_rank, module_names, timeout_s=150.0)
    return {name: next((o[name] for o in outcomes if o[name] is not None), None) for name in outcomes[0]}


def _run_on_rank(environment: RankEnvironment, module_names: Sequence[str]) -> dict[str, str | None]:
    torch.set_num_threads(1)
    outcomes = {}
    with environment.communicator():
        hvd.init()
        for name in claims_of(module_names):
            module_name, function_name = name.rsplit(".", 1)
            claim = getattr(importlib.import_module(module_name), function_name)
            outcomes[name] = _outcome(claim, environment.rank)
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


def _outcome(claim: Callable[[], None], rank: int) -> str | None:
    try:
        claim()
    except (Exception, pytest.fail.Exception):  # the latter is none of the former
        return f"rank {rank}:\n{traceback.format_exc()}"
    return None
