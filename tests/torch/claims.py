"""Many claims in one set of rank processes: starting processes that import torch takes longer than most checks.

A module of claims has functions named ``claim_...``, each of which all ranks run in the same order. Its test asks
for the outcome of each by name.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

import torch

import sparkdl.torch
from tests.run_ranks import RankEnvironment, run_ranks


def claims_in(module_name: str) -> list[str]:
    """The claims of a module, in the order in which they are written."""
    return [name for name in vars(sys.modules[module_name]) if name.startswith("claim_")]


def run_claims(module_name: str, world_size: int, *, transport: str = "mpi") -> dict[str, str | None]:
    """Run the claims of a module over the process group of new ranks; say for each how it failed, or None."""
    outcomes = run_ranks(world_size, _run_on_rank, module_name, transport=transport, timeout_s=100.0)
    return {name: next((o[name] for o in outcomes if o[name] is not None), None) for name in outcomes[0]}


def _run_on_rank(environment: RankEnvironment, module_name: str) -> dict[str, str | None]:
    __import__(module_name)
    torch.set_num_threads(1)
    with environment.communicator() as communicator:
        sparkdl.torch.init_process_group(communicator, timeout_s=20.0)
        outcomes = {
            name: _outcome(getattr(sys.modules[module_name], name)) for name in claims_in(module_name)
        }
        sparkdl.torch.destroy_process_group()
    return outcomes


def _outcome(claim: Callable[[], None]) -> str | None:
    try:
        claim()
    except Exception:
        return f"rank {torch.distributed.get_rank()}:\n{traceback.format_exc()}"
    return None
