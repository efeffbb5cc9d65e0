"""Communication between ranks: rendezvous, authentication, transports.

Knows NumPy and the native core, no torch and no Spark. The contract is :class:`Communicator`;
:func:`open_communicator` opens one over a :class:`Rendezvous`.
"""

from __future__ import annotations

from sparkdl.collective.addresses import Address, listen, local_addresses
from sparkdl.collective.advice import Advice, advise
from sparkdl.collective.authentication import authenticate_client, authenticate_server, new_secret
from sparkdl.collective.communicator import Communicator
from sparkdl.collective.coordinator import Coordinator
from sparkdl.collective.current import (
    current_communicator,
    provide_communicator,
    provided_communicator,
    set_current_communicator,
)
from sparkdl.collective.deadline import Deadline, check_timeout
from sparkdl.collective.dialing import connect_any, connect_authenticated
from sparkdl.collective.frames import receive_frame, send_frame
from sparkdl.collective.handle import Handle
from sparkdl.collective.host_groups import find_hosts
from sparkdl.collective.listener import AuthenticatedListener
from sparkdl.collective.opening import TRANSPORTS, WIRES, check_transport, open_communicator, uses_mpi
from sparkdl.collective.pmi import PmiServer, pmi_environment
from sparkdl.collective.rendezvous import PrefixRendezvous, Rendezvous, all_gather_bytes
from sparkdl.collective.rendezvous_client import RendezvousClient
from sparkdl.collective.report import CommunicationReport
from sparkdl.collective.stalls import StallCheck
from sparkdl.collective.world_report import WorldReport

__all__ = [
    "TRANSPORTS",
    "WIRES",
    "Address",
    "Advice",
    "AuthenticatedListener",
    "CommunicationReport",
    "Communicator",
    "Coordinator",
    "Deadline",
    "Handle",
    "PmiServer",
    "PrefixRendezvous",
    "Rendezvous",
    "RendezvousClient",
    "StallCheck",
    "WorldReport",
    "advise",
    "all_gather_bytes",
    "authenticate_client",
    "authenticate_server",
    "check_timeout",
    "check_transport",
    "connect_any",
    "connect_authenticated",
    "current_communicator",
    "find_hosts",
    "listen",
    "local_addresses",
    "new_secret",
    "open_communicator",
    "pmi_environment",
    "provide_communicator",
    "provided_communicator",
    "receive_frame",
    "send_frame",
    "set_current_communicator",
    "uses_mpi",
]
