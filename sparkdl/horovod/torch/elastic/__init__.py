"""Horovod's elastic state: what is committed survives a failed collective, and lost ranks where a Runner keeps it.

Runs on the *rank*. Ranks do not come and go: :func:`run` takes the training up again on the same ranks. A rank that
died ends them all; :class:`sparkdl.Runner` then starts as many as there is room for, and :func:`run` continues from the
last commit.
"""

from __future__ import annotations

from sparkdl.horovod.torch.elastic.commits import CommitKeeper, ObjectState, State, provide_commit_keeper
from sparkdl.horovod.torch.elastic.run import run
from sparkdl.horovod.torch.elastic.sampler import ElasticSampler
from sparkdl.horovod.torch.elastic.state import TorchState

__all__ = [
    "CommitKeeper",
    "ElasticSampler",
    "ObjectState",
    "State",
    "TorchState",
    "provide_commit_keeper",
    "run",
]
