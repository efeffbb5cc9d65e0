"""How a Python worker comes to a process that ranks are forked from: one for all workers of an executor.

Importing torch takes two seconds of a core and hundreds of megabytes. So the first worker that wants a rank starts the
process, and the others connect to it, by a name in Linux's abstract namespace (unix(7)): whoever binds a socket to it
is the first, and it is free again when that socket is no longer there. Both sides see to it that the other one runs as
the same user.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

from sparkdl.collective import Deadline
from sparkdl.errors import LaunchError
from sparkdl.launch.forkserver.client import RankNursery, peer_process

_JOIN_TIMEOUT_S = 5.0
"""How long a process that another worker has started may take to let this one in: it does before it imports."""

_LOOK_S = 0.02


def reach_nursery(environment: Mapping[str, str], modules: Sequence[str]) -> RankNursery:
    """Connect to the process that suits, or start it if there is none.

    One of its own is started for this worker where the other ones' has other variables, or is not to be seen from here.

    Args:
        environment: its variables, and those of its ranks.
        modules: what it imports.

    Raises:
        LaunchError: if it cannot be started.
    """
    name, deadline, pause = _name(environment, modules), Deadline(_JOIN_TIMEOUT_S), threading.Event()
    while not deadline.expired:
        if (door := _bind(name)) != "taken":
            return _start(environment, modules, door)
        if (connection := _knock(name)) is not None:
            pid = peer_process(connection)
            if pid is not None and _variables_of(pid) == dict(environment):
                return RankNursery(connection, pid, said=_open_output(pid))
            connection.close()
            break
        pause.wait(_LOOK_S)
    return _start(environment, modules, None)


def begin_nursery(environment: Mapping[str, str], modules: Sequence[str]) -> RankNursery | None:
    """Start the process that suits; None if another worker has done so.

    Raises:
        LaunchError: if it cannot be started.
    """
    door = _bind(_name(environment, modules))
    return None if door == "taken" else _start(environment, modules, door)


def _start(environment: Mapping[str, str], modules: Sequence[str], door: socket.socket | None) -> RankNursery:
    # What it says while it imports belongs to no rank, and is of interest if it dies of it.
    said = os.fdopen(os.memfd_create("sparkdl-nursery", os.MFD_CLOEXEC), "wb")
    heard = open(f"/proc/self/fd/{said.fileno()}", "rb")  # noqa: SIM115 - read after its end, with a place of its own
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    passed = [end.fileno() for end in (theirs, door) if end is not None]
    try:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sparkdl.launch.forkserver.process"),
                *(str(theirs.fileno()), "-" if door is None else str(door.fileno())),
                *modules,
            ],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            pass_fds=passed,
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        heard.close()
        raise LaunchError(
            f"the process that a rank is forked from cannot be started: {sys.executable}: {error.strerror}. "
            "Look at the limits of processes and descriptors on this machine."
        ) from error
    finally:
        theirs.close()
        said.close()
        if door is not None:
            door.close()
    return RankNursery(ours, process.pid, said=heard, process=process)


def _name(environment: Mapping[str, str], modules: Sequence[str]) -> str:
    """What those who can share a process find each other by. Every user of the machine can read it: no values.

    But for that of the GPUs, in which ranks always differ: they need not wait for each other to find that out.
    """
    gpus = environment.get("CUDA_VISIBLE_DEVICES")
    kind = hashlib.sha256(json.dumps([sys.executable, list(modules), sorted(environment), gpus]).encode())
    return f"\0sparkdl-nursery-{_sharing_process()}-{kind.hexdigest()}"


def _sharing_process() -> int:
    """The process whose children share what they inherit: limits, priority, cores. Ours, outside of a Spark task."""
    # By the module itself, which a client of Spark Connect alone does not have.
    tasks = sys.modules.get("pyspark.taskcontext")
    is_in_task = tasks is not None and tasks.TaskContext.get() is not None
    return os.getppid() if is_in_task else os.getpid()


def _bind(name: str) -> socket.socket | Literal["taken"] | None:
    """Take the name; None where a sandbox does not let this process have any."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        door.bind(name)
    except OSError as error:
        door.close()
        return "taken" if error.errno == errno.EADDRINUSE else None
    return door


def _knock(name: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)  # whoever has the name may let nobody in
    try:
        connection.connect(name)
    except OSError:  # nobody listens yet, or any more
        connection.close()
        return None
    connection.setblocking(True)
    return connection


def _variables_of(pid: int) -> dict[str, str] | None:
    """The variables that a process of this user was started with; None if they cannot be read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (os.fsdecode(entry).partition("=") for entry in raw.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def _open_output(pid: int) -> IO[bytes] | None:
    try:
        return open(f"/proc/{pid}/fd/1", "rb")
    except OSError:
        return None
