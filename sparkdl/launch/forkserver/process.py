"""The process that ranks are forked from: it has imported what they need and waits until the next one is wanted.

Started by a Python worker of Spark as ``python -m sparkdl.launch.forkserver.process FD DOOR MODULE...``, where FD is
one end of a socket pair whose other end :mod:`sparkdl.launch.forkserver.client` holds, and DOOR a bound socket by which
other workers connect, or ``-``. It ends with the last of them, also when that is killed, and a rank ends with the one
that wanted it. It runs nothing of the user's: a rank finds itself as if it had just been started.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from sparkdl.launch.forkserver.client import NurseryClient, NurseryClients
from sparkdl.launch.rank import process
from sparkdl.launch.rank.pulse import STACK_SIGNAL

MAX_REQUEST_BYTES = 1 << 16
MAX_FDS = 8
_LOOK_MS = 100


def main() -> int:
    """Serve until the workers are gone; in a forked rank, run that. Returns the exit status."""
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)  # for who waits for its rank in vain
    first, door = (None if number == "-" else _received(int(number)) for number in sys.argv[1:3])
    assert first is not None
    clients = NurseryClients(first, door)
    with _ending_with(clients):
        import_all(sys.argv[3:])
    fds = _serve(clients)
    return 0 if fds is None else process.main(*fds)


def _received(number: int) -> socket.socket:
    os.set_inheritable(number, False)
    return socket.socket(fileno=number)


@contextmanager
def _ending_with(clients: NurseryClients) -> Iterator[None]:
    """Inside, the process ends as soon as nobody is there any more who could want a rank."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            for client in clients.await_any(select.POLLRDHUP, timeout_ms=_LOOK_MS):
                clients.drop(client)
            if clients.are_gone():
                os._exit(0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()  # a fork has no threads but its own


def import_all(modules: Sequence[str]) -> None:
    """Import modules; a rank that needs one which cannot be imported will fail by itself, and be heard."""
    # Imports make hundreds of thousands of objects and next to no garbage. What is frozen is never looked at by the
    # collectors of the ranks, and so stays in memory that they share.
    gc.disable()
    for module in modules:
        with suppress(Exception):
            importlib.import_module(module)
    gc.freeze()
    gc.enable()


def _serve(clients: NurseryClients) -> tuple[int, int] | None:
    """Fork ranks as they are wanted; return None when nobody is left, and in a rank its descriptors."""
    woken, waking = socket.socketpair()
    for end in (woken, waking):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # it has to have a handler to write to the pair
    signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    orphans: list[int] = []
    while not clients.are_gone():
        for client in clients.await_any(select.POLLIN, woken=woken.fileno()):
            message, fds = _receive(client)
            if not message:
                if client.rank:
                    _kill_group(client.rank)
                    orphans.append(client.rank)
                clients.drop(client)
                continue
            request = json.loads(message)
            if request["kind"] == "reap":
                os.waitpid(client.rank, 0)
                client.rank, client.exit_told = 0, False
            elif _fork_for(client, fds):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                clients.forget()
                for end in (woken, waking):
                    end.close()
                return _settle_in(request, fds)
        with suppress(BlockingIOError):
            woken.recv(64)
        for client in clients:
            _tell_of_exit(client)
        orphans = [rank for rank in orphans if not os.waitpid(rank, os.WNOHANG)[0]]
    return None


def _receive(client: NurseryClient) -> tuple[bytes, list[int]]:
    try:
        message, fds, _, _ = socket.recv_fds(client.connection, MAX_REQUEST_BYTES, MAX_FDS)
    except OSError:  # it ended without having read all that it was told
        return b"", []
    return message, fds


def _fork_for(client: NurseryClient, fds: Sequence[int]) -> bool:
    """Fork a rank and tell who wanted it; return whether this is the rank."""
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
    """Fork; return when the child leads a process group of its own, by whose number it can be ended."""
    with warnings.catch_warnings():
        # Since Python 3.12 of threads, which those of memory allocators and of BLAS are: they know what to do.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    # Both do it, whoever is first: the child could be stuck in what libraries do at a fork, and the others wait.
    with suppress(PermissionError):  # the child is so far that it has called exec
        os.setpgid(pid, pid)
    return pid


def _settle_in(request: dict[str, Any], fds: Sequence[int]) -> tuple[int, int]:
    """Make of a fork what a new process would be; return its end of the task's pair, and the file for its stacks."""
    output, task, stacks, *inherited = fds
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    numbers = zip(request["inherited"], map(str, inherited), strict=True)
    os.environ.update({**request["variables"], **dict(numbers)})
    os.chdir(request["folder"])
    with suppress(OSError), open("/proc/self/comm", "w") as name:  # by which ps tells it from its siblings
        name.write(request["name"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator does it by itself
    return task, stacks


def _tell_of_exit(client: NurseryClient) -> None:
    if not client.rank or client.exit_told:
        return
    # Not reaped yet: its number must stay taken until its process group has been ended.
    ending = os.waitid(os.P_PID, client.rank, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ending is not None:
        status = ending.si_status if ending.si_code == os.CLD_EXITED else -ending.si_status
        _send(client, {"exited": status})
        client.exit_told = True


def _send(client: NurseryClient, answer: dict[str, Any]) -> None:
    try:
        client.connection.send(json.dumps(answer).encode())
    except OSError:
        pass  # the worker is gone, which the next request tells


def _kill_group(rank: int) -> None:
    try:
        os.killpg(rank, signal.SIGKILL)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    sys.exit(main())
