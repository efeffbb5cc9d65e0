"""Horovod's elastic state, for a fixed set of ranks: what is committed survives a failed collective.

Runs on the *rank*. Ranks do not come and go: :func:`run` takes the training up again on the same ranks, and a rank
that died ends the job.
"""

from __future__ import annotations

from sparkdl.horovod.torch.elastic.object_state import ObjectState, State
from sparkdl.horovod.torch.elastic.run import run
from sparkdl.horovod.torch.elastic.sampler import ElasticSampler
from sparkdl.horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
