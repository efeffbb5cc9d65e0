"""Communication between ranks: communicators, process sets, transports and telemetry.

Rendezvous and authentication are in :mod:`sparkdl.rendezvous`; the names that callers of this package need are
exported here as well. Depends on NumPy and the native core, not on torch or Spark. The contract is
:class:`Communicator`; :func:`open_communicator` opens one over a :class:`Rendezvous`. Runs on *ranks*. Begin with
``communicator`` (the contract) and ``opening``; ``native``, ``mpi`` and ``nccl`` implement it. A lost peer is noticed
and named in ``native/src/tcp/lifeline.cc`` and ``native/src/operation_guard.cc``, and with MPI in ``mpi/peers.py``;
``error_origin`` distinguishes errors that follow from such a loss from errors of the rank's own code.
"""

from __future__ import annotations

from sparkdl.collective.communicator import Communicator, Handle
from sparkdl.collective.current import (
    current_communicator,
    provide_communicator,
    provided_communicator,
    set_current_communicator,
)
from sparkdl.collective.opening import TRANSPORTS, WIRES, check_transport, open_communicator, uses_mpi
from sparkdl.collective.telemetry.communication_report import CommunicationReport, WorldReport
from sparkdl.collective.telemetry.stalls import StallCheck
from sparkdl.rendezvous.addresses import Address
from sparkdl.rendezvous.client import RendezvousClient
from sparkdl.rendezvous.coordinator import Coordinator
from sparkdl.rendezvous.deadline import Deadline, check_timeout
from sparkdl.rendezvous.dialing import connect_authenticated
from sparkdl.rendezvous.handshake import new_secret
from sparkdl.rendezvous.hosts import find_hosts
from sparkdl.rendezvous.listener import AuthenticatedListener
from sparkdl.rendezvous.pmi import PmiServer, pmi_environment
from sparkdl.rendezvous.store import Rendezvous, all_gather_bytes

__all__ = [
    "TRANSPORTS",
    "WIRES",
    "Address",
    "AuthenticatedListener",
    "CommunicationReport",
    "Communicator",
    "Coordinator",
    "Deadline",
    "Handle",
    "PmiServer",
    "Rendezvous",
    "RendezvousClient",
    "StallCheck",
    "WorldReport",
    "all_gather_bytes",
    "check_timeout",
    "check_transport",
    "connect_authenticated",
    "current_communicator",
    "find_hosts",
    "new_secret",
    "open_communicator",
    "pmi_environment",
    "provide_communicator",
    "provided_communicator",
    "set_current_communicator",
    "uses_mpi",
]
