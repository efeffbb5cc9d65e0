"""Joining the job that a process is a rank of, and leaving it when the process ends. Runs on ranks.

In peace after the last line of its program; with an abort, which ends the others as well, after an exception.
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
from enum import Enum
from typing import TYPE_CHECKING

from sparkdl.collective.addresses import Address
from sparkdl.collective.authentication import new_secret
from sparkdl.collective.coordinator import Coordinator
from sparkdl.collective.deadline import Deadline
from sparkdl.collective.job import Job
from sparkdl.collective.opening import open_communicator
from sparkdl.collective.rendezvous import post
from sparkdl.collective.rendezvous_client import RendezvousClient
from sparkdl.errors import (
    CommunicatorAbortedError,
    CommunicatorError,
    CommunicatorTimeoutError,
    RankLostError,
)
from sparkdl.topology import name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sparkdl.collective.communicator import Communicator

logger = logging.getLogger(__name__)

FAILURE_KEY = "job/failure"
"""Where the rank that failed first tells its launcher why, as JSON of ``rank``, ``host`` and ``error``."""

_DEPARTURES = "job/departures"
_CONNECT_TIMEOUT_S = 60.0
_SHORT_FAREWELL_S = 5.0
"""How long a rank that failed waits for the others, which it has aborted."""


def enter_job(job: Job, coordinator: Coordinator | None = None) -> RendezvousClient:
    """Connect to the coordinator of a job, once, and leave the job when the process ends; no other rank is waited for.

    Args:
        job: which one.
        coordinator: of the job, if it lives in this process, which then ends after the last rank has left, or after the
            job's timeout.

    Raises:
        ConnectionError: if the coordinator cannot be reached.
        SparkdlError: if it has another secret, or is gone.
    """
    return _enter(job, coordinator).client


def join_job(job: Job, coordinator: Coordinator | None = None) -> Communicator:
    """Enter a job and open the communicator of all its ranks.

    Args:
        job: which one.
        coordinator: as of :func:`enter_job`.

    Raises:
        ConnectionError: if the coordinator cannot be reached.
        SparkdlError: as :func:`~sparkdl.collective.opening.open_communicator`.
    """
    membership = _enter(job, coordinator)
    membership.communicator = open_communicator(
        rendezvous=membership.client.prefix("ranks"),
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
    spread: Callable[[bytes], bytes],
    environ: Mapping[str, str],
    *,
    host: str | Sequence[str] | None = None,
) -> Communicator:
    """Found a job among ranks that know each other already, and join it: rank 0 has the coordinator.

    Args:
        rank: number of this rank.
        world_size: how many ranks there are.
        spread: gives all ranks the bytes that it is called with on rank 0.
        environ: where the user's choices are.
        host: address or addresses of rank 0's machine at which the others reach it; what
            :func:`~sparkdl.collective.addresses.reachable_hosts` chooses when None.
    """
    coordinator, invitation = None, b""
    if rank == 0:
        secret = new_secret()
        coordinator = Coordinator(secret=secret, world_size=world_size, host=host)
        invitation = json.dumps([coordinator.address.to_bytes().decode(), secret.hex()]).encode()
    try:
        address, secret_text = json.loads(spread(invitation))
        job = Job(
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


class Origin(Enum):
    """Where an error that a rank raised began."""

    OWN = "own"
    """In what this rank ran."""
    SHARED = "shared"
    """In what the ranks run together: they disagree about an operation, and all of them are told so."""
    ABORTED = "aborted"
    """On another rank, which ended the communicator or left it."""
    LATE = "late"
    """On another rank, which did not take part in time."""
    LOST = "lost"
    """On another rank, which died or cannot be reached any more."""


def origin_of(error: BaseException | None) -> Origin:
    """Find where an error began, by the errors that it was raised from."""
    seen: set[int] = set()
    is_shared = is_own = False
    while error is not None and id(error) not in seen:
        if isinstance(error, RankLostError):
            return Origin.LOST
        if isinstance(error, CommunicatorTimeoutError):
            return Origin.LATE
        if isinstance(error, CommunicatorAbortedError) or type(error) is CommunicatorError:
            return Origin.ABORTED
        # Others, as Horovod's, say that a collective failed, and stand for what they were raised from.
        is_shared |= isinstance(error, CommunicatorError)
        is_own |= not isinstance(error, CommunicatorError)
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return Origin.SHARED if is_shared and not is_own else Origin.OWN


def is_consequence(error: BaseException | None) -> bool:
    """Whether another rank's failure is behind an error."""
    return origin_of(error) in (Origin.ABORTED, Origin.LATE, Origin.LOST)


def _enter(job: Job, coordinator: Coordinator | None) -> _Membership:
    with _entering:
        if job not in _memberships:
            client = RendezvousClient.connect(
                job.coordinator, job.secret, timeout_s=min(job.timeout_s, _CONNECT_TIMEOUT_S)
            )
            try:
                client.post_if_lost(_DEPARTURES, str(job.rank).encode())
            except BaseException:
                client.close()
                raise
            membership = _memberships[job] = _Membership(job, client, coordinator)
            atexit.register(membership.leave)
        return _memberships[job]


class _Membership:
    """What a rank holds of its job, until its process ends.

    Attributes:
        client: its connection to the coordinator.
        communicator: of all ranks, once it was opened.
    """

    def __init__(self, job: Job, client: RendezvousClient, coordinator: Coordinator | None) -> None:
        self.client = client
        self.communicator: Communicator | None = None
        self._job, self._coordinator = job, coordinator
        self._pid = os.getpid()

    def leave(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child ends
        # What the interpreter has just printed as the reason of its end.
        failure: BaseException | None = getattr(sys, "last_value", None)
        # The errors: the coordinator, or whoever had it, has left already.
        with contextlib.suppress(CommunicatorError):
            if failure is not None:
                self._tell(failure)
        if self.communicator is not None:
            with contextlib.suppress(CommunicatorError):
                self.communicator.close()
        with contextlib.suppress(CommunicatorError):
            self._depart(self._job.timeout_s if failure is None else _SHORT_FAREWELL_S)
        self.client.close()
        if self._coordinator is not None:
            self._coordinator.close()

    def _tell(self, failure: BaseException) -> None:
        rank, text = self._job.rank, f"{type(failure).__name__}: {failure}"
        if not is_consequence(failure):
            news = {"rank": rank, "host": socket.gethostname(), "error": text}
            self.client.compare_set(FAILURE_KEY, b"", json.dumps(news).encode())
        if self.communicator is not None:
            self.communicator.abort(f"rank {rank} failed: {text}")

    def _depart(self, timeout_s: float) -> None:
        self.client.post_if_lost(_DEPARTURES, b"")
        post(self.client, _DEPARTURES, str(self._job.rank).encode())
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


_memberships: dict[Job, _Membership] = {}
_entering = threading.Lock()

# A forked child has none of the threads of a client.
os.register_at_fork(after_in_child=_memberships.clear)
