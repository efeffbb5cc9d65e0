"""The one copy of a model on a GPU that several tasks of an executor share, in a process of its own.

Where a task of Spark gets a part of a GPU, several Python workers use it at once, and each would hold the weights and a
context of CUDA. Instead, the first of them starts a process that holds both; the workers prepare rows, send the inputs
of the module over a Unix socket, and get its outputs. The process ends when no worker has been connected for a while.

Workers find the process by a folder that only their user can enter. It holds the socket, the key that both sides prove
to have, and a lock under which a process is started or ends.
"""

from __future__ import annotations

import argparse
import faulthandler
import fcntl
import logging
import os
import pickle
import secrets
import select
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import IO, Any, NoReturn

import safetensors.torch
import torch
from torch import nn

from sparkdl.errors import ProcessesLostError, SparkdlError
from sparkdl.identity import digest
from sparkdl.model.architecture import join_module, join_tensors, split_tensors
from sparkdl.model.weights_file import map_weights, weights_as_bytes

_logger = logging.getLogger(__name__)

_IDLE_S = 60.0
"""Time without a connected worker after which the process ends: longer than that between two stages."""

_START_S = 300.0
_ANSWER_S = 1800.0
"""Longer than a batch of generated texts takes while other tasks wait for theirs."""

_MOST_MODELS = 4
_MOST_ATTEMPTS = 3
_LOST = (EOFError, ConnectionError)
"""Errors on the socket of a process that has ended, or is ending."""

_SOCKET, _KEY, _LOCK, _LOG = "socket", "key", "lock", "log"
_MOST_BYTES_OF_PATH = 103
"""Maximum length of a Unix socket's path that all systems accept."""

_ALONE = nn.Module()
"""A module without tensors: inputs and outputs belong to no module, so their tensors have no names."""

_started: dict[Path, subprocess.Popen[bytes]] = {}
"""The last process that this worker started in a folder, whose exit status it gets."""


class SharedModule(nn.Module):
    """Calls a module that another process of this host holds, and starts that process if there is none.

    Args:
        key: unique key of the module.
        structure: pickle of the module without its tensors.
        weights: tensors of the module in the safetensors format, or the path of the file that holds them.
        device: device on which the process holds the module.
        owner: name of what the process belongs to, such as an executor; another owner has another process.
        idle_s: time without a connected worker after which a new process ends.
    """

    def __init__(
        self,
        key: str,
        structure: bytes,
        weights: bytes | str,
        *,
        device: str,
        owner: str,
        idle_s: float = _IDLE_S,
    ) -> None:
        super().__init__()
        self._key, self._model = key, (structure, weights, list(sys.path))
        self._device, self._idle_s = device, idle_s
        self._folder = _private_folder(digest({"owner": owner, "device": device})[:12])
        self._connection: Connection[Any, Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns, on the CPU.

        Raises:
            Exception: what the module raises.
            SparkdlError: if the process cannot be started.
            ProcessesLostError: if it ended repeatedly, or does not answer.
        """
        packed = _pack((args, kwargs))
        for _ in range(_MOST_ATTEMPTS):
            try:
                kind, *content = self._ask(*packed)
                if kind == "unknown":
                    kind, *content = self._ask(*packed, *self._model)
            except _LOST:
                self._connection = None
                continue
            except BlockingIOError as error:
                self._connection = None
                raise ProcessesLostError(
                    f"{_name(self._device)} did not answer in time, at most {_ANSWER_S:g} s. {_log_of(self._folder)}"
                ) from error
            if kind == "failed":
                _raise(content.pop())
            return _unpack(*content)
        process = _started.get(self._folder)
        status = "" if process is None else f", the last time with {process.wait(_START_S)}"
        raise ProcessesLostError(
            f"{_name(self._device)} ended {_MOST_ATTEMPTS} times{status}. {_log_of(self._folder)}"
        )

    def _ask(self, *content: Any) -> Any:
        if self._connection is None:
            self._connection = _connect(self._folder, self._device, self._idle_s)
        self._connection.send((self._key, *content))
        return self._connection.recv()


def _raise(error: Exception) -> NoReturn:
    try:
        raise error
    finally:
        del error  # otherwise the exception would keep this frame, and with it the callers'


def _name(device: str) -> str:
    return f"The process that shares a model on {device}"


def _log_of(folder: Path) -> str:
    """Return a sentence with the end of the log of the process of a folder."""
    log = folder / _LOG
    return f"Its log {log} ends with: {log.read_text(errors='replace').strip()[-2000:]}"


def _pack(value: Any, device: str = "cpu") -> tuple[bytes, bytes]:
    structure, tensors = split_tensors(value, _ALONE)
    return structure, weights_as_bytes({name: tensor.to(device) for name, tensor in tensors.items()})


def _unpack(structure: bytes, tensors: bytes, device: str = "cpu") -> Any:
    read = safetensors.torch.load(tensors)
    return join_tensors(structure, {name: tensor.to(device) for name, tensor in read.items()})


def _private_folder(name: str) -> Path:
    name = f"sparkdl-{os.getuid()}-{name}"
    folder = Path(tempfile.gettempdir(), name)
    if len(os.fsencode(folder / _SOCKET)) > _MOST_BYTES_OF_PATH:
        raise SparkdlError(
            f"The folder of temporary files {folder.parent} has a path too long for a Unix socket, which tasks that "
            "share a GPU need. Set a shorter TMPDIR on the executors, as by spark.executorEnv.TMPDIR=/tmp."
        )
    return folder


def _make_private(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise SparkdlError(
            f"{folder} is not a private folder of this user, and a model cannot be shared there. Remove it."
        )


def _lock(folder: Path) -> IO[str]:
    """Return the open file of a folder's lock, which is held until the file is closed; makes the folder."""
    while True:
        with suppress(FileNotFoundError):  # a process that ended removed the folder meanwhile
            _make_private(folder)
            file = (folder / _LOCK).open("a")
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:
                return file
            file.close()


def _connect(folder: Path, device: str, idle_s: float) -> Connection[Any, Any]:
    """Return a connection to the process that shares models in a folder, after starting it if there is none."""
    with _lock(folder):
        try:
            return _open_connection(folder)
        except (FileNotFoundError, *_LOST):
            _start(folder, device, idle_s)
            return _open_connection(folder)


def _open_connection(folder: Path) -> Connection[Any, Any]:
    connection = Client(str(folder / _SOCKET), "AF_UNIX")
    _limit(connection, _START_S)
    key = (folder / _KEY).read_bytes()
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    _limit(connection, _ANSWER_S)
    return connection


def _limit(connection: Connection[Any, Any], seconds: float) -> None:
    """Have a connection raise BlockingIOError if it can send or receive nothing for ``seconds``, in whole seconds."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))


def _start(folder: Path, device: str, idle_s: float) -> None:
    (folder / _SOCKET).unlink(missing_ok=True)
    key = os.open(folder / _KEY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(key, "wb") as file:
        file.write(secrets.token_bytes(32))
    command = [sys.executable, "-m", __name__, str(folder), device, "--idle-s", str(idle_s)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (folder / _LOG).open("wb") as log:
        process = _started[folder] = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdout is not None, "it is a pipe"
    with process.stdout:
        is_in_time = bool(select.select([process.stdout], [], [], _START_S)[0])
        if is_in_time and process.stdout.readline():
            return
    if not is_in_time:
        process.kill()
    status = process.wait()
    how = f"ended with {status}" if is_in_time else f"was not ready within {_START_S:g} s"
    raise SparkdlError(f"{_name(device)} {how}. {_log_of(folder)}")


class _Server:
    """Holds modules on a device, and runs them for connected workers."""

    def __init__(self, folder: Path, device: str, idle_s: float) -> None:
        self._folder, self._device, self._idle_s = folder, device, idle_s
        self._modules: OrderedDict[str, tuple[nn.Module, threading.Lock]] = OrderedDict()
        self._changing = threading.Condition()
        self._num_workers = 0

    def serve(self) -> None:
        """Answer workers until none has been connected for a while."""
        self._compute()  # fails now if there is no such device
        key = (self._folder / _KEY).read_bytes()
        listener = Listener(str(self._folder / _SOCKET), "AF_UNIX", authkey=key)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        print("ready", flush=True)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what modules print is in the log
        while True:
            with self._changing:
                is_busy = self._changing.wait_for(lambda: self._num_workers > 0, self._idle_s)
                self._changing.wait_for(lambda: self._num_workers == 0)
            if not is_busy:
                with _lock(self._folder):  # no worker connects now
                    if not self._num_workers:
                        listener.close()
                        shutil.rmtree(self._folder)
                        return

    def _compute(self) -> None:
        """Raise an exception if the device cannot compute."""
        torch.zeros(1, device=self._device).add(1).item()

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
            except Exception as error:  # of a worker that ended, or of a program without the key
                _logger.info("A connection failed: %s: %s", type(error).__name__, error)
                continue
            self._count(1)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _count(self, change: int) -> None:
        with self._changing:
            self._num_workers += change
            self._changing.notify_all()

    def _answer(self, connection: Connection[Any, Any]) -> None:
        try:
            with connection:
                while True:
                    request = connection.recv()
                    try:
                        connection.send(self._run(*request))
                    except Exception as error:
                        try:
                            connection.send(("failed", _portable(error)))
                        finally:
                            self._end_if_broken()
        except (EOFError, OSError):  # the worker has ended
            pass
        finally:
            self._count(-1)

    def _end_if_broken(self) -> None:
        """End this process if its context of CUDA is lost; the next request starts another one."""
        try:
            self._compute()
        except Exception:
            _logger.exception("The device %s cannot compute any more, and the process ends.", self._device)
            os._exit(1)

    def _run(self, key: str, structure: bytes, tensors: bytes, *model: Any) -> tuple[Any, ...]:
        with self._changing:
            if key not in self._modules:
                if not model:
                    return ("unknown",)
                while len(self._modules) >= _MOST_MODELS:
                    self._modules.popitem(last=False)
                self._modules[key] = self._load(*model), threading.Lock()
            module, lock = self._modules[key]
            self._modules.move_to_end(key)
        args, kwargs = _unpack(structure, tensors, self._device)
        with lock, torch.inference_mode():  # a module may keep what it computes
            return ("done", *_pack(module(*args, **kwargs)))

    def _load(self, structure: bytes, weights: bytes | str, path: list[str]) -> nn.Module:
        sys.path += [entry for entry in path if entry not in sys.path]
        tensors = safetensors.torch.load(weights) if isinstance(weights, bytes) else map_weights(weights)
        return join_module(structure, tensors).to(self._device).eval()


def _portable(error: Exception) -> Exception:
    """Return an exception that pickle can carry to the worker."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("device")
    parser.add_argument("--idle-s", type=float)
    options = parser.parse_args()
    faulthandler.enable()
    print("Process", os.getpid(), file=sys.stderr, flush=True)
    _Server(options.folder, options.device, options.idle_s).serve()


if __name__ == "__main__":
    _main()
