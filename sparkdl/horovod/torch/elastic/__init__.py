"""Horovod's elastic state: committed values survive a failed collective and, if a Runner stores them, lost ranks.

Runs on the *rank*. Begin with ``run``. The set of ranks does not change: :func:`run` restarts the training function on
the same ranks. If a rank dies, all ranks end; :class:`sparkdl.Runner` then starts as many as there is room for, and
:func:`run` continues from the last commit.
"""

from __future__ import annotations

from sparkdl.horovod.torch.elastic.run import run
from sparkdl.horovod.torch.elastic.sampler import ElasticSampler
from sparkdl.horovod.torch.elastic.state import ObjectState, State, TorchState

__all__ = [
    "ElasticSampler",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]
