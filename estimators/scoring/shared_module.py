"""The one copy of a model on a GPU that several tasks of an executor share, in a process of its own.

Where a task of Spark gets a part of a GPU, several Python workers use it at once, and each would hold the weights and a
context of CUDA. Instead, the first of them starts a process that holds both; the workers prepare rows, send the inputs
of the module over a Unix socket, and get its outputs. The process ends when no worker has been connected for a while.

Workers find the process by a folder that only their user can enter. It holds the socket, the key that both sides prove
to have, and a lock under which a process is started or ends.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import pickle
import secrets
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from sparkdl.errors import SparkdlError
from sparkdl.identity import digest
from sparkdl.model.architecture import join_module, join_tensors, split_tensors
from sparkdl.model.weights_file import map_weights, weights_as_bytes

_logger = logging.getLogger(__name__)

_IDLE_S = 60.0
"""Time without a connected worker after which the process ends: longer than that between two stages."""

_MOST_MODELS = 4
_MOST_ATTEMPTS = 3
_LOST = (EOFError, ConnectionError)
"""What a process that has ended, or is ending, shows on the socket."""

_SOCKET, _KEY, _LOCK, _LOG = "socket", "key", "lock", "log"
_ALONE = nn.Module()
"""A module without tensors: those of inputs and outputs have no names."""


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
        """
        packed = _pack((args, kwargs))
        reply = self._answered("run", self._key, *packed)
        if reply[0] == "unknown":
            self._answered("load", self._key, *self._model)
            reply = self._answered("run", self._key, *packed)
        return _unpack(*reply[1:])

    def _answered(self, *request: Any) -> Any:
        """Return the reply to a request, also if the process was killed, or has ended meanwhile."""
        for _ in range(_MOST_ATTEMPTS - 1):
            try:
                return self._ask(*request)
            except _LOST:
                self._connection = None
        return self._ask(*request)

    def _ask(self, *request: Any) -> Any:
        if self._connection is None:
            self._connection = _connect(self._folder, self._device, self._idle_s)
        self._connection.send(request)
        reply = self._connection.recv()
        if reply[0] != "failed":
            return reply
        error: Exception = reply[1]
        del reply
        try:
            raise error
        finally:
            del error  # otherwise the exception would keep this frame, and with it the connection


def _pack(value: Any, device: str = "cpu") -> tuple[bytes, bytes]:
    structure, tensors = split_tensors(value, _ALONE)
    return structure, weights_as_bytes({name: tensor.to(device) for name, tensor in tensors.items()})


def _unpack(structure: bytes, tensors: bytes, device: str = "cpu") -> Any:
    read = safetensors.torch.load(tensors)
    return join_tensors(structure, {name: tensor.to(device) for name, tensor in read.items()})


def _private_folder(name: str) -> Path:
    folder = Path(tempfile.gettempdir(), f"sparkdl-{os.getuid()}-{name}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise SparkdlError(
            f"{folder} is not private to this user, and a model cannot be shared there. Remove it."
        )
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / _LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _connect(folder: Path, device: str, idle_s: float) -> Connection[Any, Any]:
    """Return a connection to the process that shares models in a folder, after starting it if there is none."""
    with _locked(folder):
        try:
            return _connected(folder)
        except (FileNotFoundError, *_LOST):
            _start(folder, device, idle_s)
            return _connected(folder)


def _connected(folder: Path) -> Connection[Any, Any]:
    return Client(str(folder / _SOCKET), "AF_UNIX", authkey=(folder / _KEY).read_bytes())


def _start(folder: Path, device: str, idle_s: float) -> None:
    (folder / _SOCKET).unlink(missing_ok=True)
    key = os.open(folder / _KEY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(key, "wb") as file:
        file.write(secrets.token_bytes(32))
    command = [sys.executable, "-m", __name__, str(folder), device, "--idle-s", str(idle_s)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (folder / _LOG).open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdout is not None, "it is a pipe"
    with process.stdout:
        is_ready = process.stdout.readline()
    if not is_ready:
        last = (folder / _LOG).read_text(errors="replace").strip()[-2000:]
        raise SparkdlError(f"The process that shares a model on {device} ended with {process.wait()}: {last}")


class _Server:
    """Holds modules on a device, and runs them for connected workers."""

    def __init__(self, folder: Path, device: str, idle_s: float) -> None:
        self._folder, self._device, self._idle_s = folder, device, idle_s
        self._modules: OrderedDict[str, nn.Module] = OrderedDict()
        self._changing = threading.Condition()
        self._num_workers = 0

    def serve(self) -> None:
        """Answer workers until none has been connected for a while."""
        torch.empty(0, device=self._device)  # fails now if there is no such device
        with Listener(
            str(self._folder / _SOCKET), "AF_UNIX", authkey=(self._folder / _KEY).read_bytes()
        ) as listener:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            print("ready", flush=True)
            while True:
                with self._changing:
                    is_busy = self._changing.wait_for(lambda: self._num_workers > 0, self._idle_s)
                    self._changing.wait_for(lambda: self._num_workers == 0)
                if not is_busy:
                    with _locked(self._folder):  # no worker connects now
                        if not self._num_workers:
                            (self._folder / _SOCKET).unlink(missing_ok=True)
                            return

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
                    kind, key, *content = connection.recv()
                    try:
                        reply = self._load(key, *content) if kind == "load" else self._run(key, *content)
                    except Exception as error:
                        reply = ("failed", _portable(error))
                    connection.send(reply)
        except (EOFError, OSError):  # the worker has ended
            pass
        finally:
            self._count(-1)

    def _load(self, key: str, structure: bytes, weights: bytes | str, path: list[str]) -> tuple[str]:
        with self._changing:
            if key not in self._modules:
                sys.path += [entry for entry in path if entry not in sys.path]
                tensors = (
                    safetensors.torch.load(weights) if isinstance(weights, bytes) else map_weights(weights)
                )
                self._modules[key] = join_module(structure, tensors).to(self._device).eval()
            while len(self._modules) > _MOST_MODELS:
                self._modules.popitem(last=False)
        return ("loaded",)

    def _run(self, key: str, structure: bytes, tensors: bytes) -> tuple[Any, ...]:
        with self._changing:
            module = self._modules.get(key)
            if module is None:
                return ("unknown",)
            self._modules.move_to_end(key)
        args, kwargs = _unpack(structure, tensors, self._device)
        with torch.inference_mode():
            returned = module(*args, **kwargs)
        return ("done", *_pack(returned))


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
    _Server(options.folder, options.device, options.idle_s).serve()


if __name__ == "__main__":
    _main()
