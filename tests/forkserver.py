"""Forks rank processes from one that has already imported their modules: torch alone takes a process three seconds.

A forked rank has the environment, the folder and the output that a process started by the caller would have.
Variables that libraries read at import cannot be set after the fork: see :func:`forkservers_for`.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from sparkdl.launch.forkserver.process import part_from_parent
from sparkdl.launch.rank.process import exit_rank

ALWAYS_PRELOADED = ("numpy",)
WITH_TORCH = ("torch.distributed", "torch._dynamo")
"""Modules imported along with torch; the first optimizer that a process makes would import the last one."""

OF_A_FIT = "sparkdl.data.feed.epoch_reader"
"""Module that :func:`sparkdl.training.trainer.train` imports when it reads the first rows, and with it pyarrow."""

NOT_PRELOADED = "tests.gpu."
"""Prefix of modules that count GPUs at import, after which no fork can use one; sparkdl.torch is preloaded instead."""

READ_AT_IMPORT = (
    "PYTHON",
    "LD_",
    "GLIBC_",
    "MALLOC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH_",
)
"""Prefixes of variables that must be set when a process starts."""

NUM_FORKSERVERS = 2
"""Number of forkservers per environment. Ranks of one share the seed of string hashes, unlike launched ranks."""

_ABOVE_ALL_FDS = 500


class ForkedRank:
    """A rank of a forkserver, with the methods of :class:`subprocess.Popen` that callers use."""

    def __init__(self, forkserver: Forkserver, pid: int) -> None:
        self._forkserver, self._pid = forkserver, pid
        self._fd = os.pidfd_open(pid)
        self._code: int | None = None

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        if self._code is None:
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end; return its exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: if it has not ended after ``timeout`` seconds.
        """
        if self._code is None:
            if not select.select([self._fd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"rank process {self._pid}", timeout or 0.0)
            self._code = self._forkserver.ask({"reap": self._pid})
            os.close(self._fd)
        return self._code


class Forkserver:
    """The process that forks ranks. It ends with its creator, and its ranks end with it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._lock = threading.Lock()
        self._preloaded: set[str] = set()
        subprocess.Popen(
            [sys.executable, "-m", "tests.forkserver", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=dict(environment),
        )
        theirs.close()

    @contextmanager
    def preloading(self, modules: Collection[str]) -> Iterator[None]:
        """Import modules in the process, once for all later ranks, while the block runs."""
        with self._lock:
            if wanted := sorted(set(modules) - self._preloaded):
                self._send({"preload": wanted})
            yield
            if wanted:
                self._receive()
            self._preloaded.update(wanted)

    def fork(self, environment: Mapping[str, str], fds: Sequence[int]) -> ForkedRank:
        """Fork a rank.

        Args:
            environment: environment variables of the rank.
            fds: descriptors that it inherits under their numbers; the first is its connection to the caller.
        """
        request = {
            "environment": dict(environment),
            "folder": os.getcwd(),
            "fds": list(fds),
        }
        return ForkedRank(self, self.ask(request, [1, 2, *fds]))

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> int:
        """Send a request to the process and return its answer."""
        with self._lock:
            self._send(request, fds)
            return self._receive()

    def _send(self, request: dict[str, Any], fds: Sequence[int] = ()) -> None:
        socket.send_fds(self._socket, [json.dumps(request).encode()], fds)

    def _receive(self) -> int:
        answer = self._socket.recv(64)
        if not answer:
            raise RuntimeError("the process that forks ranks has ended: look for its traceback above")
        return int(answer)


_forkservers: dict[tuple[object, ...], Forkserver] = {}
_opening = threading.Lock()


def forkservers_for(
    num_ranks: int, environment: Mapping[str, str], modules: Collection[str]
) -> list[Forkserver]:
    """Return the forkserver of each rank of a world; start forkservers at first use.

    Args:
        num_ranks: number of ranks.
        environment: environment variables of all ranks. Each set of variables that libraries read at import has its own
            forkservers.
        modules: modules of the ranks' functions and arguments. Importing torchmetrics, for example, takes a process
            another two seconds. When this returns, all forkservers have imported them, side by side, so that ranks do
            not wait long for each other.
    """
    read_at_import = {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}
    forkservers = []
    with _opening, ExitStack() as preloading:
        for number in range(min(num_ranks, NUM_FORKSERVERS)):
            key = (number, *sorted(read_at_import.items()))
            if key not in _forkservers:
                _forkservers[key] = Forkserver(environment)
            preloading.enter_context(_forkservers[key].preloading(modules))
            forkservers.append(_forkservers[key])
    return [forkservers[rank % NUM_FORKSERVERS] for rank in range(num_ranks)]


def _main(fd: int) -> None:
    from tests.run_ranks import rank_main

    _preload(ALWAYS_PRELOADED)
    with socket.socket(fileno=fd) as requests:
        while True:
            message, fds, _, _ = socket.recv_fds(requests, 1 << 20, 8)
            if not message:
                return
            request = json.loads(message)
            if "reap" in request:
                requests.send(str(_reap(request["reap"])).encode())
                continue
            if "preload" in request:
                _preload(request["preload"])
                requests.send(b"0")
                continue
            pid = os.fork()
            if pid == 0:
                break
            for received in fds:
                os.close(received)
            requests.send(str(pid).encode())
    _set_up_fork(request, fds)
    rank_main(request["fds"][0])
    exit_rank(0)


def _preload(modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module("sparkdl.torch" if name.startswith(NOT_PRELOADED) else name)
    if "torch" in sys.modules:
        for name in WITH_TORCH:
            importlib.import_module(name)
    if "sparkdl.training.trainer" in sys.modules:
        importlib.import_module(OF_A_FIT)
    gc.freeze()  # keeps the collectors of forks from visiting, and thereby copying, the objects that all forks share


def _reap(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _set_up_fork(request: dict[str, Any], fds: Sequence[int]) -> None:
    """Give a fork the state of a new process."""
    # Move them out of the way of the target numbers first.
    high = [fcntl.fcntl(received, fcntl.F_DUPFD, _ABOVE_ALL_FDS) for received in fds]
    for received in fds:
        os.close(received)
    for source, target in zip(high, [1, 2, *request["fds"]], strict=True):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    part_from_parent()


if __name__ == "__main__":
    _main(int(sys.argv[1]))
