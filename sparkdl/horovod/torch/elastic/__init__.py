"""Horovod's elastic state: committed values survive a failed collective and, if a Runner stores them, lost ranks.

Runs on the *rank*. Begin with ``run``. :func:`run` restarts the training function on the same ranks, or, in an elastic
run (``Runner(elastic=True)``), on those that are there. In any other run all ranks end if one of them dies;
:class:`sparkdl.Runner` then starts as many as there is room for, and :func:`run` continues from the last commit.
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
