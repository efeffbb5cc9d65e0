"""Many claims in one set of rank processes: starting processes that import torch takes longer than most checks.

A module of claims has functions named ``claim_...``, each of which all ranks run in the same order. Its test asks
for the outcome of each by name.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable

import torch

import sparkdl.horovod.torch as hvd
import sparkdl.torch
from tests.run_ranks import RankEnvironment, run_ranks


def claims_in(module_name: str) -> list[str]:
    """The claims of a module, in the order in which they are written."""
    return [name for name in vars(sys.modules[module_name]) if name.startswith("claim_")]


def run_claims(
    module_name: str, world_size: int, *, transport: str = "auto", face: str = "torch"
) -> dict[str, str | None]:
    """Run the claims of a module on new ranks; say for each how it failed, or None.

    Args:
        module_name: where the claims are.
        world_size: how many ranks to start.
        transport: of the ranks' communicator.
        face: what is initialized over it, ``"torch"`` for torch.distributed or ``"horovod"``.
    """
    outcomes = run_ranks(world_size, _run_on_rank, module_name, face, transport=transport, timeout_s=100.0)
    return {name: next((o[name] for o in outcomes if o[name] is not None), None) for name in outcomes[0]}


def _run_on_rank(environment: RankEnvironment, module_name: str, face: str) -> dict[str, str | None]:
    module = importlib.import_module(module_name)
    torch.set_num_threads(1)
    with environment.communicator() as communicator:
        if face == "torch":
            sparkdl.torch.init_process_group(communicator, timeout_s=20.0)
        else:
            hvd.init()
        outcomes = {
            name: _outcome(getattr(module, name), communicator.rank) for name in claims_in(module_name)
        }
        sparkdl.torch.destroy_process_group()
        hvd.shutdown()
    return outcomes


def _outcome(claim: Callable[[], None], rank: int) -> str | None:
    try:
        claim()
    except Exception:
        return f"rank {rank}:\n{traceback.format_exc()}"
    return None
