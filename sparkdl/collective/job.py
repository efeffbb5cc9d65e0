"""The job that a rank belongs to: its environment variables, joining it, and leaving it when the process ends.

Runs on ranks and in the processes that start them. ``sparkdl run`` sets the variables.
:mod:`sparkdl.collective.current` reads the variables of other launchers, and
:mod:`sparkdl.collective.torchrun_variables` those of ``torchrun``.

A rank leaves its job normally after the last line of its program. After an exception it aborts, which ends the other
ranks as well.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import sys
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sparkdl.collective.error_origin import is_consequence
from sparkdl.collective.opening import open_communicator
from sparkdl.errors import (
    CommunicatorError,
    CommunicatorTimeoutError,
    LaunchError,
    ParamError,
)
from sparkdl.rendezvous.addresses import Address
from sparkdl.rendezvous.client import RendezvousClient
from sparkdl.rendezvous.coordinator import Coordinator
from sparkdl.rendezvous.deadline import Deadline, check_timeout
from sparkdl.rendezvous.handshake import new_secret
from sparkdl.topology import name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sparkdl.collective.communicator import Communicator

logger = logging.getLogger(__name__)

RANK, WORLD_SIZE = "SPARKDL_RANK", "SPARKDL_WORLD_SIZE"
COORDINATOR, SECRET = "SPARKDL_COORDINATOR", "SPARKDL_SECRET"
JOB_VARIABLES = (RANK, WORLD_SIZE, COORDINATOR, SECRET)
"""Environment variables that make a process a rank of a job."""

TRANSPORT, WIRE, TIMEOUT_S = "SPARKDL_TRANSPORT", "SPARKDL_WIRE", "SPARKDL_TIMEOUT_S"


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """Everything that a rank needs to find the other ranks of its job.

    Attributes:
        rank: number of the rank.
        world_size: number of ranks.
        coordinator: address of the coordinator, which serves the rendezvous.
        secret: the job's secret.
        transport: transport of the communicator; see :func:`~sparkdl.collective.opening.open_communicator`.
        wire: format in which sums and averages of float32 travel between hosts.
        timeout_s: seconds for opening the communicator, and the default deadline of every operation.
    """

    rank: int
    world_size: int
    coordinator: Address
    secret: bytes = field(repr=False)
    transport: str = "auto"
    wire: str = "float32"
    timeout_s: float = 300.0

    def to_variables(self) -> dict[str, str]:
        """Return the environment variables for the rank's process, which only its user can read."""
        return {
            RANK: str(self.rank),
            WORLD_SIZE: str(self.world_size),
            COORDINATOR: self.coordinator.to_bytes().decode(),
            SECRET: self.secret.hex(),
            TRANSPORT: self.transport,
            WIRE: self.wire,
            TIMEOUT_S: str(self.timeout_s),
        }

    def is_at(self, host: str | None, port: str | int | None) -> bool:
        """Whether ``host`` and ``port`` are the address of this job's coordinator."""
        hosts = {*self.coordinator.hosts, "localhost"}
        return str(port) == str(self.coordinator.port) and host in hosts

    @classmethod
    def from_variables(cls, environ: Mapping[str, str]) -> RankJob | None:
        """Decode the variables of :meth:`to_variables`; None if none of them is set.

        Raises:
            LaunchError: if some of them are missing or invalid; the message names the variables.
        """
        values = find_all(environ, JOB_VARIABLES, "Start ranks by `sparkdl run`, which sets all of them.")
        if values is None:
            return None
        rank, world_size, coordinator, secret = values
        try:
            job = cls(
                rank=int(rank),
                world_size=int(world_size),
                coordinator=Address.from_bytes(coordinator),
                secret=bytes.fromhex(secret),
            )
        except ValueError as error:
            raise LaunchError(
                f"{', '.join(JOB_VARIABLES)} do not describe a job: {error}. Start ranks by `sparkdl run`, which sets "
                "all of them."
            ) from error
        return job.with_choices_of(environ)

    def with_choices_of(self, environ: Mapping[str, str]) -> RankJob:
        """Return this job with the user's transport, wire format and timeout, where ``environ`` sets them.

        Raises:
            LaunchError: if the timeout is not a valid number of seconds.
        """
        timeout_s = environ.get(TIMEOUT_S) or str(self.timeout_s)
        try:
            seconds = check_timeout(float(timeout_s), TIMEOUT_S)
        except (ParamError, ValueError) as error:
            raise LaunchError(f"{TIMEOUT_S}={timeout_s} is not a timeout: {error}") from error
        return replace(
            self,
            transport=environ.get(TRANSPORT) or self.transport,
            wire=environ.get(WIRE) or self.wire,
            timeout_s=seconds,
        )


def find_all(environ: Mapping[str, str], names: Sequence[str], remedy: str) -> list[str] | None:
    """Return the values of variables that must be set together; None if none of them is set.

    Raises:
        LaunchError: if only some of them are set; the message names the missing ones.
    """
    there = [name for name in names if environ.get(name)]
    missing = [name for name in names if name not in there]
    if there and missing:
        raise LaunchError(
            f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} set, but not {', '.join(missing)}. {remedy}"
        )
    return [environ[name] for name in there] or None


FAILURE_KEY = "job/failure"
"""Key at which the rank that failed first reports the reason to its launcher: JSON of ``rank``, ``host``, ``error``."""

ENTERED_KEY = "job/entered"
"""Key that exists once a rank has entered the job."""

_DEPARTURES = "job/departures"
_CONNECT_TIMEOUT_S = 60.0
_SHORT_FAREWELL_S = 5.0
"""How long a failed rank with the coordinator waits for the other ranks, which it has aborted, to leave the job."""


def enter_job(job: RankJob, coordinator: Coordinator | None = None) -> JobMembership:
    """Connect to the coordinator of a job once per process, and leave the job when the process ends.

    Does not wait for other ranks.

    Args:
        job: job to enter.
        coordinator: coordinator of the job, if it runs in this process. The process then ends only after the last rank
            has left the job, or after the job's timeout.

    Raises:
        ConnectionError: if the coordinator cannot be reached.
        SparkdlError: if the coordinator has another secret, or has ended.
    """
    with _entering:
        if job not in _memberships:
            client = RendezvousClient.connect(
                job.coordinator, job.secret, timeout_s=min(job.timeout_s, _CONNECT_TIMEOUT_S)
            )
            try:
                client.post_if_lost(_DEPARTURES, str(job.rank).encode())
                client.set(ENTERED_KEY, b"")
            except BaseException:
                client.close()
                raise
            membership = _memberships[job] = JobMembership(job, client, coordinator)
            atexit.register(membership.leave)
        return _memberships[job]


def join_job(job: RankJob, coordinator: Coordinator | None = None) -> Communicator:
    """Enter a job and open the communicator of all its ranks.

    Args:
        job: job to join.
        coordinator: see :func:`enter_job`.

    Raises:
        ConnectionError: if the coordinator cannot be reached.
        SparkdlError: see :func:`enter_job` and :func:`~sparkdl.collective.opening.open_communicator`.
    """
    membership = enter_job(job, coordinator)
    membership.communicator = open_communicator(
        rendezvous=membership.client.view("ranks"),
        rank=job.rank,
        world_size=job.world_size,
        secret=job.secret,
        transport=job.transport,
        wire=job.wire,
        timeout_s=job.timeout_s,
    )
    return membership.communicator


def host_job(
    rank: int,
    world_size: int,
    broadcast: Callable[[bytes], bytes],
    environ: Mapping[str, str],
    *,
    host: str | Sequence[str] | None = None,
) -> Communicator:
    """Create a job of ranks that can already communicate, and join it; rank 0 runs the coordinator.

    Args:
        rank: number of this rank.
        world_size: number of ranks.
        broadcast: function that returns, on every rank, the bytes that rank 0 passes to it.
        environ: environment variables, with the user's choices.
        host: address or addresses at which the other ranks reach the machine of rank 0; chosen by
            :func:`~sparkdl.rendezvous.addresses.reachable_hosts` when None.
    """
    coordinator, invitation = None, b""
    if rank == 0:
        secret = new_secret()
        coordinator = Coordinator(secret=secret, world_size=world_size, host=host)
        invitation = json.dumps([coordinator.address.to_bytes().decode(), secret.hex()]).encode()
    try:
        address, secret_text = json.loads(broadcast(invitation))
        job = RankJob(
            rank=rank,
            world_size=world_size,
            coordinator=Address.from_bytes(address),
            secret=bytes.fromhex(secret_text),
        )
        return join_job(job.with_choices_of(environ), coordinator)
    except BaseException:
        if coordinator is not None:
            coordinator.close()
        raise


class JobMembership:
    """Membership of this process in a job, until the process ends.

    Attributes:
        client: connection to the coordinator.
        communicator: communicator of all ranks; None until it is opened.
    """

    def __init__(self, job: RankJob, client: RendezvousClient, coordinator: Coordinator | None) -> None:
        self.client = client
        self.communicator: Communicator | None = None
        self._job, self._coordinator = job, coordinator
        self._pid = os.getpid()

    def leave(self) -> None:
        """Leave the job, at the end of the process; after an exception report it, and abort the other ranks."""
        if os.getpid() != self._pid:
            return  # the ending process is a forked child
        # The exception that ends the program, which the interpreter has just printed.
        failure: BaseException | None = getattr(sys, "last_value", None)
        # Errors here mean that the coordinator, or the process that ran it, has already ended.
        with contextlib.suppress(CommunicatorError):
            if failure is not None:
                self._publish(failure)
        if self.communicator is not None:
            with contextlib.suppress(CommunicatorError):
                self.communicator.close()
        with contextlib.suppress(CommunicatorError):
            self._depart(self._job.timeout_s if failure is None else _SHORT_FAREWELL_S)
        self.client.close()
        if self._coordinator is not None:
            self._coordinator.close()

    def _publish(self, failure: BaseException) -> None:
        rank, text = self._job.rank, f"{type(failure).__name__}: {failure}"
        if not is_consequence(failure):
            news = {"rank": rank, "host": socket.gethostname(), "error": text}
            self.client.compare_set(FAILURE_KEY, b"", json.dumps(news).encode())
        if self.communicator is not None:
            self.communicator.abort(f"rank {rank} failed: {text}")

    def _depart(self, timeout_s: float) -> None:
        self.client.post_if_lost(_DEPARTURES, b"")
        self.client.post(_DEPARTURES, str(self._job.rank).encode())
        if self._coordinator is None:
            return
        deadline, missing = Deadline(timeout_s), set(range(self._job.world_size))
        try:
            for number in range(1, self._job.world_size + 1):
                missing.discard(int(self.client.get(f"{_DEPARTURES}/{number}", deadline.remaining_s())))
        except CommunicatorTimeoutError:
            logger.warning(
                "The coordinator ends with rank %d, %.3g s after its program; %s had not left the job, and can find no"
                " other ranks any more.",
                self._job.rank,
                timeout_s,
                name_ranks(sorted(missing)),
            )


_memberships: dict[RankJob, JobMembership] = {}
_entering = threading.Lock()

# A forked child does not have the threads of the clients.
os.register_at_fork(after_in_child=_memberships.clear)
