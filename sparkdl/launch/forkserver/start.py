"""Finds or starts the forkserver of an executor, which all its Python workers share.

Importing torch takes two seconds of a core and hundreds of megabytes. The first worker that needs a rank therefore
starts the forkserver, and the others connect to it by a name in Linux's abstract socket namespace (unix(7)). The worker
that binds the name is the first, and the name is free again when the socket is closed. Both sides check that the other
one runs as the same user.
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
from sparkdl.launch.forkserver.client import ForkserverConnection, peer_process

JOIN_TIMEOUT_S = 5.0
"""How long a forkserver of another worker may take to accept a connection; it listens before it imports."""

_POLL_S = 0.02


def connect_or_start(environment: Mapping[str, str], modules: Sequence[str]) -> ForkserverConnection:
    """Connect to the matching forkserver, or start it if there is none.

    If the other workers' forkserver has other environment variables, or cannot be reached from here, this worker starts
    a forkserver of its own.

    Args:
        environment: environment variables of the forkserver and its ranks.
        modules: modules that the forkserver imports.

    Raises:
        LaunchError: if the forkserver cannot be started.
    """
    name, deadline, pause = socket_name(environment, modules), Deadline(JOIN_TIMEOUT_S), threading.Event()
    while not deadline.expired:
        if (listener := _bind(name)) != "taken":
            return _start(environment, modules, listener)
        if (connection := _connect(name)) is not None:
            pid = peer_process(connection)
            if pid is not None and _variables_of(pid) == dict(environment):
                return ForkserverConnection(connection, pid, output=_open_output(pid))
            connection.close()
            break
        pause.wait(_POLL_S)
    return _start(environment, modules, None)


def start_if_first(environment: Mapping[str, str], modules: Sequence[str]) -> ForkserverConnection | None:
    """Start the matching forkserver; return None if another worker has already started it.

    Raises:
        LaunchError: if the forkserver cannot be started.
    """
    listener = _bind(socket_name(environment, modules))
    return None if listener == "taken" else _start(environment, modules, listener)


def _start(
    environment: Mapping[str, str], modules: Sequence[str], listener: socket.socket | None
) -> ForkserverConnection:
    # The forkserver's output during the imports belongs to no rank; if the forkserver dies, it explains why.
    written = os.fdopen(os.memfd_create("sparkdl-forkserver", os.MFD_CLOEXEC), "wb")
    # A second file object, for a position of its own.
    output = open(f"/proc/self/fd/{written.fileno()}", "rb")  # noqa: SIM115 - read after the process has ended
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    passed = [end.fileno() for end in (theirs, listener) if end is not None]
    try:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sparkdl.launch.forkserver.process"),
                *(str(theirs.fileno()), "-" if listener is None else str(listener.fileno())),
                *modules,
            ],
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            pass_fds=passed,
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        output.close()
        raise LaunchError(
            f"the forkserver cannot be started: {sys.executable}: {error.strerror}. "
            "Look at the limits of processes and descriptors on this machine."
        ) from error
    finally:
        theirs.close()
        written.close()
        if listener is not None:
            listener.close()
    return ForkserverConnection(ours, process.pid, output=output, process=process)


def socket_name(environment: Mapping[str, str], modules: Sequence[str]) -> str:
    """The socket name for workers that can share a forkserver.

    All users can read the name, so it does not depend on the values of variables. The one exception is the variable of
    the GPUs, which always differs between ranks: with it in the name, they do not connect in vain.
    """
    gpus = environment.get("CUDA_VISIBLE_DEVICES")
    kind = hashlib.sha256(json.dumps([sys.executable, list(modules), sorted(environment), gpus]).encode())
    return f"\0sparkdl-forkserver-{_sharing_process()}-{kind.hexdigest()}"


def _sharing_process() -> int:
    """Process id of the process whose children inherit the same limits, priority and cores.

    In a Spark task this is the parent of the Python worker, otherwise this process.
    """
    # Looked up without an import, as a pure client of Spark Connect does not have the module.
    tasks = sys.modules.get("pyspark.taskcontext")
    is_in_task = tasks is not None and tasks.TaskContext.get() is not None
    return os.getppid() if is_in_task else os.getpid()


def _bind(name: str) -> socket.socket | Literal["taken"] | None:
    """Bind the name; return ``"taken"`` if another process has bound it, None if a sandbox refuses all names."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(name)
    except OSError as error:
        listener.close()
        return "taken" if error.errno == errno.EADDRINUSE else None
    return listener


def _connect(name: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)  # the owner of the name may not accept connections
    try:
        connection.connect(name)
    except OSError:  # nothing listens yet, or any more
        connection.close()
        return None
    connection.setblocking(True)
    return connection


def _variables_of(pid: int) -> dict[str, str] | None:
    """Initial environment variables of a process of this user; None if they cannot be read."""
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
