"""Runs any training function or script on ranks, from Spark or on this machine; also with HorovodRunner's signature.

The *driver* makes a :class:`Runner` or a :class:`HorovodRunner`; on the *ranks* torch.distributed, the communicator,
the Horovod face and MPI are ready. Knows no DataFrame and no estimator.
"""

from __future__ import annotations

from sparkdl.runner.horovod_runner import HorovodRunner
from sparkdl.runner.runner import Runner

__all__ = ["HorovodRunner", "Runner"]
