"""The collectives under the module name that Horovod has for them, for programs that import them from there."""

from __future__ import annotations

from sparkdl.horovod.torch import *  # noqa: F403  # everything of the package has a place in Horovod's mpi_ops
