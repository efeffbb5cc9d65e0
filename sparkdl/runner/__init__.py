"""Runs any training function or script on ranks, from Spark or on this machine; also with HorovodRunner's signature.

The *driver* makes a :class:`Runner` or a :class:`HorovodRunner`; on the *ranks* torch.distributed, the communicator,
the Horovod face and MPI are ready, and a :class:`TrainingState` outlives ranks that are lost. Knows no DataFrame and no
estimator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkdl.runner.horovod_runner import HorovodRunner
from sparkdl.runner.rank_logging import progress
from sparkdl.runner.runner import Runner

if TYPE_CHECKING:
    from sparkdl.runner.training_state import TrainingState

__all__ = ["HorovodRunner", "Runner", "TrainingState", "progress"]


def __getattr__(name: str) -> Any:
    # Needs torch, which the driver of a cluster need not have.
    if name == "TrainingState":
        from sparkdl.runner.training_state import TrainingState

        return TrainingState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
