"""The rank process: receives the function from its barrier task, runs it, sends back its value or its failure.

The process is forked from :mod:`sparkdl.launch.forkserver.process`, with one end of a socket pair whose other end its
barrier task holds. Function, secret and result travel only over that pair: never as arguments, variables or files. The
function comes first and is unpickled at once, which imports the modules that it needs. The rank's assignment, with rank
and world size, follows when the barrier tasks have met.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import re
import resource
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias

import cloudpickle

from sparkdl.collective import RendezvousClient, provide_communicator
from sparkdl.collective.error_origin import Origin, origin_of
from sparkdl.collective.job import RankJob
from sparkdl.errors import CommunicatorError, SerializationError
from sparkdl.foreign_errors import errors_as
from sparkdl.launch.rank.context import RankContext
from sparkdl.launch.rank.heartbeat import RankHeartbeat
from sparkdl.launch.rank.stacks import RankStacks
from sparkdl.launch.wire.messages import CHUNK_BYTES, MessageConnection, error_text, pack_error
from sparkdl.tracebacks import describe_exception

CONNECT_TIMEOUT_S = 60.0
MAX_ERROR_CHARS = 1 << 20

Call: TypeAlias = "Callable[[RankContext], Any]"


def main(task_fd: int, stacks_fd: int) -> int:
    """Run one rank; the exit status is 0 if its function returned.

    Args:
        task_fd: file descriptor of the rank's end of the socket pair.
        stacks_fd: file descriptor to which the rank writes the stacks of its threads on request.
    """
    task = MessageConnection(socket.socket(fileno=task_fd))
    faulthandler.enable()
    stacks, heartbeat = RankStacks(stacks_fd), RankHeartbeat(task)
    call = _receive_call(task)
    assignment, _ = _receive(task)
    try:
        _send_result(task, _run(task, assignment, call, heartbeat, stacks))
    except BaseException as error:
        _ChunkWriter(task, "error").write(pack_error(error))
        task.send({"kind": "failure", "failure": _describe(error)})
        return 1
    return 0


def exit_rank(status: int) -> NoReturn:
    """End this process with its threads joined, its exit handlers called and its files flushed.

    Freeing the objects of all modules and the statics of torch's libraries, as at the end of an interpreter, takes
    0.25 s of a core and copies 120 MB that the rank shares with its forkserver, to free memory that is freed anyway. As
    where multiprocessing ends a fork, finalizers of objects and C's exit handlers do not run.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing ends a fork
    atexit._run_exitfuncs()
    if "mpi4py.MPI" in sys.modules:
        gc.freeze()
        sys.exit(status)  # it finalizes MPI at the very end of the interpreter
    imported = [file for reference in _files_of_imports if (file := reference()) is not None]
    files: list[Any] = [sys.stdout, sys.stderr, *imported, *_open_files()]
    for file in files:
        with contextlib.suppress(Exception):  # closed, or its disk is full
            file.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(status)


_files_of_imports: list[weakref.ref[io.IOBase]] = []
"""The files that the function's modules have opened."""


def _open_files() -> Iterator[io.IOBase]:
    """The files of all objects that are not frozen."""
    return (item for item in gc.get_objects() if issubclass(type(item), io.IOBase))


def _receive(task: MessageConnection) -> tuple[dict[str, Any], memoryview]:
    message = task.receive()
    if message is None:
        sys.exit("the barrier task ended before it had sent the function and the assignment")
    return message


def _receive_call(task: MessageConnection) -> Call:
    """Return the call.

    If it cannot be unpickled, return a call that raises the error, so that it is reported once the other ranks run.
    """
    payload = bytearray()
    while (message := _receive(task))[0]["kind"] != "unpickle":
        payload += message[1]
    # Imports make hundreds of thousands of objects and next to no garbage: collections would take a quarter of the time
    # that importing torch takes. Frozen objects are never visited again.
    gc.disable()
    try:
        function, args, kwargs = cloudpickle.loads(payload)
    except BaseException as error:
        failure = error

        def fail(context: RankContext) -> NoReturn:
            del context
            raise failure

        return fail
    finally:
        _files_of_imports.extend(map(weakref.ref, _open_files()))
        gc.freeze()
        gc.enable()
    return lambda context: function(context, *args, **kwargs)


def _run(
    task: MessageConnection,
    assignment: dict[str, Any],
    call: Call,
    heartbeat: RankHeartbeat,
    stacks: RankStacks,
) -> Any:
    job, member = RankJob.from_variables(assignment["job"]), assignment["member"]
    assert job is not None, "it has all variables"
    with RendezvousClient.connect(job.coordinator, job.secret, timeout_s=CONNECT_TIMEOUT_S) as client:
        context = RankContext(
            job=job,
            rendezvous=client.view("ranks") if member is None else client,
            task=task,
            heartbeat=heartbeat,
            stacks=stacks,
            member=member,
        )
        context.begin()
        provide_communicator(lambda: context.communicator, lambda: context.open_communicator)
        try:
            value = call(context)
        except BaseException as error:
            # Reported at once: other ranks may fail because of this error, and their failures may end this rank.
            task.send({"kind": "raised", "failure": _describe(error)})
            with contextlib.suppress(CommunicatorError):  # it would hide the first error
                context.close(failed=True, reason=f"rank {context.rank} failed: {error_text(error)}")
            raise
        context.close()
        return value


class _ChunkWriter(io.RawIOBase):
    """A file that a pickler writes to; data is sent in chunks, so that a large value is not copied."""

    def __init__(self, task: MessageConnection, kind: str) -> None:
        self._task = task
        self._kind = kind

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            self._task.send({"kind": self._kind}, view[start : start + CHUNK_BYTES])
        return len(view)


_REMEDY = (
    "Return numbers, arrays, tensors or a state_dict(); of a DistributedDataParallel its .module, and of a generator a "
    "list."
)


def _send_result(task: MessageConnection, value: Any) -> None:
    writer = io.BufferedWriter(_ChunkWriter(task, "result"), buffer_size=CHUNK_BYTES)
    with errors_as(SerializationError, "The value that the function returned cannot be pickled", _REMEDY):
        cloudpickle.dump(value, writer)
    writer.flush()
    task.send({"kind": "returned"})


_OF_LITTLE_MEMORY = re.compile(
    "MemoryError|can't start new thread|can't allocate memory|Cannot allocate memory|std::bad_alloc"
)


def _advice(error: BaseException) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and _OF_LITTLE_MEMORY.search(error_text(error)):
        return (
            f". The address space of this process is limited to {limit / 2**30:.1f} GiB, in Spark by "
            "spark.executor.pyspark.memory: raise that setting or leave it out"
        )
    if not isinstance(error, SystemExit):
        return ""
    is_success = error.code in (None, 0)
    return (
        ". The function, or what it called, ended with sys.exit() and did not return"
        f"{': use return instead of sys.exit()' if is_success else ''}"
    )


def _describe(error: BaseException) -> dict[str, Any]:
    """The fields of a :class:`~sparkdl.launch.wire.outcome.Failure` that the rank itself knows."""
    origin = origin_of(error)
    return {
        "error": f"{error_text(error).removesuffix(': ')}{_advice(error)}"[:MAX_ERROR_CHARS],
        "traceback": describe_exception(error, max_chars=MAX_ERROR_CHARS),
        "is_consequence": origin in (Origin.ABORTED, Origin.LATE, Origin.LOST),
        "origin": origin.value,
    }
