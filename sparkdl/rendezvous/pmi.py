"""MPI without mpirun: the server side of PMI-1, MPICH's simple process-management protocol, for one rank.

Runs in the parent of a rank (the barrier task, or another launcher) and serves the rank over an inherited socket pair,
so that no socket has to listen. The values that one rank puts reach the others through the job's authenticated
rendezvous. The protocol is lines of ``key=value`` words; see ``src/pmi`` in MPICH and
https://doi.org/10.1007/978-3-642-15646-5_4.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from typing import TYPE_CHECKING

from sparkdl.closing import Closing
from sparkdl.errors import CommunicatorError
from sparkdl.rendezvous.hosts import FOLDER
from sparkdl.rendezvous.store import Rendezvous, all_gather_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

_MAX_KEY_CHARACTERS = 64
_MAX_VALUE_CHARACTERS = 1024
_MAX_LINE_BYTES = 4096
_MAPPING_KEY = "PMI_process_mapping"
_GET_TIMEOUT_S = 0.0
"""A get follows the barrier after which every put is visible: a key that is missing then will not be set later."""


def pmi_environment(fd: int, rank: int, world_size: int) -> dict[str, str]:
    """Environment variables of a rank process that describe its end of the socket pair to MPICH.

    Args:
        fd: descriptor that the rank process inherits (``pass_fds``).
        rank: number of the rank.
        world_size: number of ranks of the MPI world.
    """
    return {"PMI_FD": str(fd), "PMI_RANK": str(rank), "PMI_SIZE": str(world_size), "PMI_SPAWNED": "0"}


def process_mapping(host_of_rank: Sequence[int]) -> str | None:
    """Describe which ranks share a host in MPICH's format, ``(vector,(first host, hosts, ranks on each),...)``.

    None if the text would be too long for a PMI-1 value; MPICH then compares host names.
    """
    blocks: list[list[int]] = []
    for rank, host in enumerate(host_of_rank):
        if rank and host == host_of_rank[rank - 1]:
            blocks[-1][1] += 1
        else:
            blocks.append([host, 1])
    vector = "".join(f",({host},1,{num_ranks})" for host, num_ranks in blocks)
    mapping = f"(vector{vector})"
    return mapping if len(mapping) < _MAX_VALUE_CHARACTERS else None


class PmiServer(Closing):
    """Serves PMI-1 to one rank from a thread, until that rank finalizes MPI or dies; a context manager.

    Args:
        sock: the parent's end of the socket pair; closed by :meth:`close`.
        rendezvous: rendezvous shared by the parents of all ranks; use a view of it for this world alone.
        rank: number of the rank.
        world_size: number of ranks of the MPI world.
        host_of_rank: host index of every rank; MPICH uses shared memory between ranks of one host. When None, MPICH
            compares host names.
        timeout_s: seconds that a barrier waits for the other ranks.

    Attributes:
        failure: description of what went wrong, with the numbers of missing ranks; None without a failure.
        has_begun: whether the rank has begun to initialize MPI.
    """

    def __init__(
        self,
        sock: socket.socket,
        rendezvous: Rendezvous,
        rank: int,
        world_size: int,
        *,
        host_of_rank: Sequence[int] | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self._sock = sock
        self._rendezvous = rendezvous.view("pmi")
        self._rank = rank
        self._world_size = world_size
        self._mapping = process_mapping(host_of_rank) if host_of_rank is not None else None
        self._timeout_s = timeout_s
        self._num_barriers = 0
        # MPICH names its shared memory after this name, so every job of the machine needs a different one.
        name = f"sparkdl-{secrets.token_hex(8)}".encode()
        try:
            self._kvs_name = self._rendezvous.compare_set("name", b"", name).decode()
        except CommunicatorError:
            sock.close()
            raise
        self.failure: str | None = None
        self.has_begun = False
        self._thread = threading.Thread(target=self._serve, name=f"sparkdl-pmi-{rank}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the connection, and remove files that MPICH leaves behind without MPI_Finalize.

        To be called after the rank has ended; a rank that still initializes MPI fails. May be called again.
        """
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        # A barrier under way ends with its deadline; there is no need to wait for it.
        self._thread.join(timeout=1.0)
        self._sock.close()
        _remove_shared_memory(self._kvs_name)

    def _serve(self) -> None:
        try:
            with self._sock.makefile("rb") as lines:
                while line := lines.readline(_MAX_LINE_BYTES):
                    if not self._handle(_parse(line)):
                        return
        except (OSError, ValueError, CommunicatorError) as error:
            # In PMI-1, closing the connection is the only way to end the wait of a rank.
            self.failure = f"MPI start-up of rank {self._rank} failed: {error}"
            logger.warning("%s", self.failure)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _handle(self, request: dict[str, str]) -> bool:
        """Answer one request; return whether to continue."""
        command = request.get("cmd", "")
        if command == "init":
            self.has_begun = True
            self._answer("response_to_init", pmi_version="1", pmi_subversion="1", rc="0")
        elif command == "initack":
            self._sock.sendall(
                f"cmd=initack\ncmd=set size={self._world_size}\ncmd=set rank={self._rank}\n"
                "cmd=set debug=0\n".encode()
            )
        elif command == "get_maxes":
            self._answer(
                "maxes",
                kvsname_max="64",
                keylen_max=str(_MAX_KEY_CHARACTERS),
                vallen_max=str(_MAX_VALUE_CHARACTERS),
            )
        elif command == "get_appnum":
            self._answer("appnum", appnum="0")
        elif command == "get_my_kvsname":
            self._answer("my_kvsname", kvsname=self._kvs_name)
        elif command == "get_universe_size":
            self._answer("universe_size", size=str(self._world_size))
        elif command == "put":
            self._put(request)
        elif command == "get":
            self._get(request)
        elif command == "barrier_in":
            self._barrier()
        elif command == "finalize":
            self._answer("finalize_ack")
            return False
        elif command == "abort":
            self.failure = f"rank {self._rank} called MPI_Abort with exit code {request.get('exitcode', '?')}"
            logger.warning("%s", self.failure)
            return False
        else:
            logger.warning("Rank %d asked for %r, which PMI-1 here does not have", self._rank, command)
            self._answer(f"{command}_result", rc="-1", msg="unknown_command")
        return True

    def _put(self, request: dict[str, str]) -> None:
        key, value = request.get("key", ""), request.get("value", "")
        if not key or len(key) > _MAX_KEY_CHARACTERS or len(value) > _MAX_VALUE_CHARACTERS:
            self._answer("put_result", rc="-1", msg="key_or_value_too_long")
            return
        self._rendezvous.set(f"keys/{key}", value.encode())
        self._answer("put_result", rc="0", msg="success")

    def _get(self, request: dict[str, str]) -> None:
        key = request.get("key", "")
        if key == _MAPPING_KEY and self._mapping is not None:
            value = self._mapping
        elif self._rendezvous.check([f"keys/{key}"]):
            value = self._rendezvous.get(f"keys/{key}", _GET_TIMEOUT_S).decode()
        else:
            self._answer("get_result", rc="-1", msg=f"key_{key}_not_found", value="unknown")
            return
        self._answer("get_result", rc="0", msg="success", value=value)

    def _barrier(self) -> None:
        self._num_barriers += 1
        all_gather_bytes(
            self._rendezvous,
            key=f"barrier/{self._num_barriers}",
            rank=self._rank,
            world_size=self._world_size,
            value=b"",
            timeout_s=self._timeout_s,
        )
        self._answer("barrier_out")

    def _answer(self, command: str, **words: str) -> None:
        line = " ".join([f"cmd={command}", *(f"{key}={value}" for key, value in words.items())])
        self._sock.sendall(line.encode() + b"\n")


def _remove_shared_memory(kvs_name: str) -> None:
    # MPIDI_POSIX_comm_bootstrap in MPICH: the files are named after the FNV-1a hash of the key-value space.
    world_id = 2166136261
    for byte in kvs_name.encode():
        world_id = ((world_id ^ byte) * 16777619) & 0xFFFFFFFF
    for path in FOLDER.glob(f"mpich_*_{world_id:x}_*"):
        path.unlink(missing_ok=True)


def _parse(line: bytes) -> dict[str, str]:
    if not line.endswith(b"\n"):
        raise ValueError(f"PMI request of more than {_MAX_LINE_BYTES} bytes, or cut off")
    words = (word.partition("=") for word in line.decode().split())
    return {key: value for key, _, value in words}
