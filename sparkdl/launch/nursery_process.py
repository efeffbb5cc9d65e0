"""The process that ranks are forked from: it has imported what they need and waits until the next one is wanted.

Started by a Python worker of Spark as ``python -m sparkdl.launch.nursery_process FD MODULE...``, where FD is one end of
a socket pair whose other end :mod:`sparkdl.launch.rank_nursery` holds. It ends with that process, also when that is
killed, and takes its rank with it. It runs nothing of the user's: a rank finds itself as if it had just been started.
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

from sparkdl.launch import rank_process

MAX_REQUEST_BYTES = 1 << 16
MAX_FDS = 8
_LOOK_MS = 100


def main() -> int:
    """Serve until the worker is gone; in a forked rank, run that. Returns the exit status."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    faulthandler.enable()
    with _ending_with(requests):
        import_all(sys.argv[2:])
    fds = _serve(requests)
    return 0 if fds is None else rank_process.main(*fds)


@contextmanager
def _ending_with(requests: socket.socket) -> Iterator[None]:
    """Inside, the process ends as soon as nobody is there any more who could want a rank."""
    is_over = threading.Event()

    def watch() -> None:
        poller = select.poll()
        poller.register(requests, select.POLLRDHUP)
        while not is_over.is_set():
            if poller.poll(_LOOK_MS):
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


def _serve(requests: socket.socket) -> tuple[int, int] | None:
    """Fork ranks one after the other; return None when the worker is gone, and in a rank its descriptors."""
    woken, waking = socket.socketpair()
    for end in (woken, waking):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # it has to have a handler to write to the pair
    signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    poller = select.poll()  # which takes descriptors of any number
    for end in (requests, woken):
        poller.register(end, select.POLLIN)
    rank, exit_told = 0, False
    while True:
        ready = [number for number, _ in poller.poll()]
        if woken.fileno() in ready:
            woken.recv(64)
            exit_told = exit_told or _tell_of_exit(requests, rank)
        if requests.fileno() not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, MAX_FDS)
        if not message:
            _kill_group(rank)
            return None
        request = json.loads(message)
        if request["kind"] == "reap":
            os.waitpid(rank, 0)
            rank, exit_told = 0, False
            continue
        try:
            rank = _fork()
        except OSError as error:
            _send(requests, {"failure": f"it could not be forked: {error.strerror}"})
            for received in fds:
                os.close(received)
            continue
        if rank == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (requests, woken, waking):
                end.close()
            return _settle_in(request, fds)
        for received in fds:
            os.close(received)
        _send(requests, {"pid": rank})


def _fork() -> int:
    """Fork; return when the child leads a process group of its own, by whose number it can be ended."""
    is_leader, leads = os.pipe()
    with warnings.catch_warnings():
        # Since Python 3.12 of threads, which those of memory allocators and of BLAS are: they know what to do.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.setsid()
    else:
        os.close(leads)
        os.read(is_leader, 1)  # the end of the pipe
    os.close(is_leader)
    if pid == 0:
        os.close(leads)
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


def _tell_of_exit(requests: socket.socket, rank: int) -> bool:
    # Not reaped yet: its number must stay taken until its process group has been ended.
    ending = os.waitid(os.P_PID, rank, os.WEXITED | os.WNOHANG | os.WNOWAIT) if rank else None
    if ending is not None:
        status = ending.si_status if ending.si_code == os.CLD_EXITED else -ending.si_status
        _send(requests, {"exited": status})
    return ending is not None


def _send(requests: socket.socket, answer: dict[str, Any]) -> None:
    try:
        requests.send(json.dumps(answer).encode())
    except OSError:
        pass  # the worker is gone, which the next request tells


def _kill_group(rank: int) -> None:
    if rank:
        try:
            os.killpg(rank, signal.SIGKILL)
        except ProcessLookupError:
            pass


if __name__ == "__main__":
    sys.exit(main())
