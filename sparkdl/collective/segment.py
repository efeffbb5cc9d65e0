"""The shared-memory segment of one host's ranks: made by one of them, opened by all, then nameless.

Its memory is reserved when it is made, so that a ``/dev/shm`` that is too small is an error now and not a
SIGBUS later.
"""

from __future__ import annotations

import errno
import os
import shutil
from typing import TYPE_CHECKING

from sparkdl.collective.deadline import Deadline
from sparkdl.collective.rendezvous import Rendezvous, all_gather_bytes
from sparkdl.collective.shared_files import FOLDER, SharedFile, open_shared
from sparkdl.errors import CommunicatorError

if TYPE_CHECKING:
    from sparkdl.topology import Topology


class SegmentError(CommunicatorError):
    """The segment cannot be made or opened on some host; every rank of the communicator raises it.

    Attributes:
        hosts: indices of the hosts concerned.
    """

    def __init__(self, message: str, *, hosts: frozenset[int]) -> None:
        super().__init__(message)
        self.hosts = hosts


def open_segment(rendezvous: Rendezvous, topology: Topology, *, num_bytes: int, timeout_s: float) -> int:
    """Make and open the segment that this host's ranks share; all ranks of the communicator take part.

    Args:
        rendezvous: of this communicator alone.
        topology: this rank's.
        num_bytes: size of the segment.
        timeout_s: seconds for all of it.

    Returns:
        Its descriptor, the caller's to close; -1 if this rank is alone on its host.

    Raises:
        SegmentError: on every rank, if it failed on any host.
        CommunicatorTimeoutError: if some rank does not take part in time; the message names it.
    """
    deadline = Deadline(timeout_s)
    leads = topology.local_size > 1 and topology.local_rank == 0
    file, failure = _make(num_bytes) if leads else (None, "")
    fd = -1
    try:
        offers = _exchange(
            rendezvous,
            topology,
            deadline,
            key="segment/made",
            path=str(file.path) if file else "",
            failure=failure,
        )
        leader = topology.local_ranks[0]
        if file is not None:
            fd = file.take_fd()
        elif topology.local_size > 1:
            fd, failure = _open(offers[leader])
        _exchange(rendezvous, topology, deadline, key="segment/opened", path="", failure=failure)
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    finally:
        if file is not None:
            file.close()
    return fd


def _exchange(
    rendezvous: Rendezvous, topology: Topology, deadline: Deadline, *, key: str, path: str, failure: str
) -> list[str]:
    answers = all_gather_bytes(
        rendezvous,
        key=key,
        rank=topology.rank,
        world_size=topology.world_size,
        value=f"{path}\n{failure}".encode(),
        timeout_s=deadline.remaining_s(),
    )
    paths, failures = zip(*(answer.decode().split("\n", 1) for answer in answers), strict=True)
    failed = {rank: text for rank, text in enumerate(failures) if text}
    if failed:
        rank = min(failed)
        hosts = frozenset(topology.host_of_rank[rank] for rank in failed)
        raise SegmentError(f"rank {rank}: {failed[rank]}", hosts=hosts)
    return list(paths)


def _make(num_bytes: int) -> tuple[SharedFile | None, str]:
    try:
        file = SharedFile("segment")
    except OSError as error:
        return None, f"cannot make a file in {FOLDER}: {error}"
    try:
        os.posix_fallocate(file.fd, 0, num_bytes)
    except OSError as error:
        file.close()
        return None, _explain(num_bytes, error)
    return file, ""


def _explain(num_bytes: int, error: OSError) -> str:
    needed_mib = -(-num_bytes // (1 << 20))
    if error.errno != errno.ENOSPC:
        return f"cannot reserve {needed_mib} MiB of shared memory in {FOLDER}: {error}"
    free_mib = shutil.disk_usage(FOLDER).free >> 20
    return (
        f"{FOLDER} has {free_mib} MiB free, but a communicator needs {needed_mib} MiB there."
        f" Enlarge it (docker run --shm-size, a memory-backed emptyDir at {FOLDER}), or pass transport='tcp'."
    )


def _open(path: str) -> tuple[int, str]:
    try:
        return open_shared(path, flags=os.O_RDWR), ""
    except OSError as error:
        return -1, f"cannot open the segment of this host: {error}"
