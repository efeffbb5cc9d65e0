"""The program of the forkserver: imports what ranks need, then forks a rank for each request.

Started by a Python worker of Spark as ``python -m sparkdl.launch.forkserver.process FD LISTENER MODULE...``. FD is one
end of a socket pair whose other end :mod:`sparkdl.launch.forkserver.client` holds, and LISTENER a bound socket through
which other workers connect, or ``-``. The forkserver ends when its last worker disconnects or is killed, and a rank
ends with the worker that requested it. The forkserver runs no user code, so that a rank begins like a new process.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from sparkdl.launch.forkserver.client import ForkserverClient, ForkserverClients
from sparkdl.launch.forkserver.guard import exit_status, signal_group
from sparkdl.launch.rank import process
from sparkdl.launch.rank.stacks import STACK_SIGNAL

MAX_REQUEST_BYTES = 1 << 16
MAX_FDS = 8
_POLL_MS = 100


def main() -> int:
    """Serve until no worker is left, and return the exit status; in a forked rank, run the rank and exit."""
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)  # for a worker that waits too long for its rank
    first, listener = (None if number == "-" else _inherited_socket(int(number)) for number in sys.argv[1:3])
    assert first is not None
    clients = ForkserverClients(first, listener)
    with _exiting_with(clients):
        import_all(sys.argv[3:])
    fds = _serve(clients)
    if fds is not None:
        process.exit_rank(process.main(*fds))
    return 0


def _inherited_socket(number: int) -> socket.socket:
    os.set_inheritable(number, False)
    return socket.socket(fileno=number)


@contextmanager
def _exiting_with(clients: ForkserverClients) -> Iterator[None]:
    """Inside the block, the process exits as soon as no worker is connected any more."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            for client in clients.poll(select.POLLRDHUP, timeout_ms=_POLL_MS):
                clients.drop(client)
            if clients.all_left():
                os._exit(0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()  # a fork has only the thread that forks


_OF_EVERY_RANK = ("sparkdl.collective.native.communicator",)
"""Modules that ranks import later, which takes each of them 10 ms."""


def import_all(modules: Sequence[str]) -> None:
    """Import modules. If one cannot be imported, a rank that needs it fails by itself and reports that."""
    # Imports make hundreds of thousands of objects and next to no garbage. The garbage collectors of the ranks skip
    # frozen objects, which therefore stay in memory that the ranks share.
    gc.disable()
    for module in (*_OF_EVERY_RANK, *modules):
        with suppress(Exception):
            importlib.import_module(module)
    if "numpy" in sys.modules:
        importlib.import_module(
            "numpy.random"
        )  # numpy itself imports it at first use, which takes a rank 20 ms
    gc.freeze()
    gc.enable()


def _serve(clients: ForkserverClients) -> tuple[int, int] | None:
    """Fork ranks on request; return None when no worker is left, or in a forked rank its descriptors."""
    wakeup, wakeup_writer = socket.socketpair()
    for end in (wakeup, wakeup_writer):
        end.setblocking(False)
    signal.signal(
        signal.SIGCHLD, lambda *_: None
    )  # without a handler nothing is written to the wakeup socket
    signal.set_wakeup_fd(wakeup_writer.fileno(), warn_on_full_buffer=False)
    orphans: list[int] = []
    while not clients.all_left():
        for client in clients.poll(select.POLLIN, wakeup_fd=wakeup.fileno()):
            message, fds = _receive(client)
            if not message:
                if client.rank:
                    signal_group(client.rank, signal.SIGKILL)
                    orphans.append(client.rank)
                clients.drop(client)
                continue
            request = json.loads(message)
            if request["kind"] == "reap":
                os.waitpid(client.rank, 0)
                client.rank, client.is_exit_reported = 0, False
            elif _fork_for(client, fds):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                clients.close_in_rank()
                for end in (wakeup, wakeup_writer):
                    end.close()
                return _become_rank(request, fds)
        with suppress(BlockingIOError):
            wakeup.recv(64)
        for client in clients:
            _report_exit(client)
        orphans = [rank for rank in orphans if not os.waitpid(rank, os.WNOHANG)[0]]
    return None


def _receive(client: ForkserverClient) -> tuple[bytes, list[int]]:
    try:
        message, fds, _, _ = socket.recv_fds(client.connection, MAX_REQUEST_BYTES, MAX_FDS)
    except OSError:  # the worker ended without reading all messages sent to it
        return b"", []
    return message, fds


def _fork_for(client: ForkserverClient, fds: Sequence[int]) -> bool:
    """Fork a rank and report it to its worker; return whether this process is the rank."""
    try:
        rank = _fork()
    except OSError as error:
        _send(client, {"failure": f"it could not be forked: {error.strerror}"})
        rank = None
    if rank == 0:
        return True
    for received in fds:
        os.close(received)
    if rank is not None:
        client.rank = rank
        _send(client, {"pid": rank})
    return False


def _fork() -> int:
    """Fork; return once the child leads a process group of its own, by whose id it can be ended."""
    with warnings.catch_warnings():
        # Python 3.12 warns of threads. Those of memory allocators and of BLAS are prepared for a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    # Parent and child both call setpgid: the child could be blocked in a library's fork handler, while other workers
    # wait for the parent.
    with suppress(PermissionError):  # the child has already called exec
        os.setpgid(pid, pid)
    return pid


def _become_rank(request: dict[str, Any], fds: Sequence[int]) -> tuple[int, int]:
    """Set up a fork like a new process; return its end of the task's socket pair, and the file for its stacks."""
    output, task, stacks, *inherited = fds
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    numbers = zip(request["inherited"], map(str, inherited), strict=True)
    os.environ.update({**request["variables"], **dict(numbers)})
    os.chdir(request["folder"])
    with suppress(OSError), open("/proc/self/comm", "w") as name:  # the name that ps shows
        name.write(request["name"])
    part_from_parent()
    return task, stacks


def part_from_parent() -> None:
    """Let a fork draw random numbers of its own, and leave it to the parent to finalize what the parent has made."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python seeds its own generator after a fork
    # Torch's registrations of operators, for example, take 35 ms to finalize.
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False


def _report_exit(client: ForkserverClient) -> None:
    if not client.rank or client.is_exit_reported:
        return
    # Not reaped yet: its process id must stay in use until its process group has been ended.
    ending = os.waitid(os.P_PID, client.rank, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ending is not None:
        _send(client, {"exited": exit_status(ending)})
        client.is_exit_reported = True


def _send(client: ForkserverClient, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the worker is gone, which the next receive reports
        client.connection.send(json.dumps(message).encode())


if __name__ == "__main__":
    sys.exit(main())
