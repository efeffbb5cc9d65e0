"""Runs any training function or script on ranks, on a Spark cluster or on this machine.

The *driver* makes a :class:`Runner`, or a :class:`HorovodRunner` with the signature of Databricks' class. On the
*ranks* torch.distributed, the communicator, the Horovod API and MPI are ready, and a :class:`TrainingState` survives
the loss of ranks. Does not depend on DataFrames and estimators. Begin with :mod:`~sparkdl.runner.runner` on the driver;
the ranks run ``on_rank`` and, with it, ``rank_logging``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.lazy import attributes
from sparkdl.runner.horovod_runner import HorovodRunner
from sparkdl.runner.rank_logging import progress
from sparkdl.runner.runner import Runner, distributed

if TYPE_CHECKING:
    from sparkdl.checkpoint.training_state import TrainingState

__all__ = ["HorovodRunner", "Runner", "TrainingState", "distributed", "progress"]


# Needs torch, which may not be installed on the driver.
__getattr__, __dir__ = attributes(__name__, {"TrainingState": "sparkdl.checkpoint.training_state"})
