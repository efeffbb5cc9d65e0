"""This process among the ranks, as Horovod names it: init, shutdown, rank, size and their local and cross forms.

Runs on the *rank*. The communicator is the one that the launcher opened; it stays the launcher's to close.
"""

from __future__ import annotations

from sparkdl.collective import Communicator, current_communicator
from sparkdl.errors import LaunchError

_communicator: Communicator | None = None


def init() -> None:
    """Join the ranks that the launcher started. Doing it again changes nothing.

    Raises:
        LaunchError: if this process is no rank: nothing opened a communicator for it.
    """
    global _communicator  # noqa: PLW0603  # Horovod's interface is one per process
    if _communicator is not None:
        return
    _communicator = current_communicator()
    if _communicator is None:
        raise LaunchError(
            "hvd.init() found no communicator: this process was not started as a rank. "
            "Run the training function by sparkdl.launch.run_on_ranks."
        )


def shutdown() -> None:
    """Leave; ``init`` may be called again."""
    global _communicator  # noqa: PLW0603
    _communicator = None


def is_initialized() -> bool:
    """``init`` has been called, and ``shutdown`` not since."""
    return _communicator is not None


def communicator() -> Communicator:
    """The communicator that ``init`` found.

    Raises:
        ValueError: if ``init`` has not been called.
    """
    if _communicator is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _communicator


def rank() -> int:
    """Number of this rank."""
    return communicator().rank


def size() -> int:
    """How many ranks there are."""
    return communicator().world_size


def local_rank() -> int:
    """Position of this rank among those of its host."""
    return communicator().topology.local_rank


def local_size() -> int:
    """How many ranks this host has."""
    return communicator().topology.local_size


def cross_rank() -> int:
    """Position of this rank's host among the hosts that have a rank of this ``local_rank``."""
    return communicator().topology.cross_rank


def cross_size() -> int:
    """How many hosts have a rank of this ``local_rank``."""
    return communicator().topology.cross_size


def is_homogeneous() -> bool:
    """All hosts have equally many ranks."""
    topology = communicator().topology
    return len({len(topology.ranks_on(host)) for host in range(topology.num_hosts)}) == 1
