"""Starts one rank process, passes on its output line by line, and ends it on request. Runs in the task of the rank.

A rank runs a function (:class:`RankSupervisor`) or, in ``sparkdl run``, a program
(:class:`~sparkdl.launch.task.program.ProgramSupervisor`). The process of a function gets it before the tasks have met,
so that it already imports the modules that the function needs and the forkserver has not imported. Its job, with rank
and world size, follows after the meeting.
"""

from __future__ import annotations

import math
import queue
import socket
import tempfile
import threading
import time
import traceback
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Any

from sparkdl.closing import Closing
from sparkdl.collective import Deadline
from sparkdl.collective.job import RankJob
from sparkdl.errors import LaunchError
from sparkdl.foreign_errors import errors_as
from sparkdl.launch.forkserver.forked_rank import ForkedRank
from sparkdl.launch.forkserver.guard import describe_exit
from sparkdl.launch.rank.stacks import StackFile, process_state
from sparkdl.launch.wire.messages import CHUNK_BYTES, MessageConnection, split_mark
from sparkdl.launch.wire.outcome import Failure, RankHealth, StopReason

if TYPE_CHECKING:
    from typing_extensions import Self

_POLL_S = 0.05
"""How often the relay checks whether ``on_line`` still processes a line, which extends the wait for the last line."""


class OutputRelay:
    """Reads one stream of a rank to its end, from a thread of its own.

    Args:
        output: reading end of the stream's pipe; closed at the end of the stream.
        on_line: called with each line.
        on_error: called with an ``OSError`` that ``on_line`` raised; no more lines are passed on then.
        name: name of the thread.
        max_bytes: maximum size of a line; a longer line is passed on in parts. Unlimited when negative.
    """

    def __init__(
        self,
        output: IO[bytes],
        *,
        on_line: Callable[[bytes], None],
        on_error: Callable[[OSError], None],
        name: str,
        max_bytes: int = -1,
    ) -> None:
        self._output, self._on_line, self._on_error = output, on_line, on_error
        self._max_bytes = max_bytes
        self._awaits_line = True
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def finish(self, deadline: Deadline, *, is_patient: bool) -> bool:
        """Wait for the last line of a rank that has ended; False if another process still holds its stream open.

        Args:
            deadline: deadline of the wait.
            is_patient: whether to wait longer while ``on_line`` processes a line: the reader of the output may pause.
        """
        while self._thread.is_alive():
            if deadline.expired and (self._awaits_line or not is_patient):
                self._is_over = True
                return not self._awaits_line
            self._thread.join(_POLL_S)
        return True

    def _run(self) -> None:
        with self._output:
            try:
                while line := self._output.readline(self._max_bytes):
                    self._awaits_line = False
                    if self._is_over:
                        return
                    self._on_line(line)
                    self._awaits_line = True
            except OSError as error:
                # No more output is read, so the rank would block, and the other ranks with it.
                self._on_error(error)


LAST_LINES = 40
"""How many of a rank's last log lines replace a traceback if it died without one."""

START_TIMEOUT_S = 600.0
"""How long the forkserver may take to import its modules: from a slow network drive it takes minutes."""

EXIT_GRACE_S = 10.0
"""How long a rank may take to exit after its function has returned (its threads may never end), or to pickle the
exception that its function has raised."""

ABORT_GRACE_S = 3.0
"""How long a rank may take, after another one has failed, to notice it and raise an error, before it is ended."""

RELAY_TIMEOUT_S = 30.0
"""How long the task may take to store the result of a rank that has ended."""

LAST_LINES_TIMEOUT_S = 2.0
"""How long after the end of a rank its output may stay open until it counts as held open by another process."""

RESULT_BYTES = 64 << 20
"""Results up to this size stay in the task's memory; larger ones wait in a temporary file."""


class Supervisor(Closing):
    """One rank and what a task does with it; a context manager that ends the rank.

    Args:
        rank: number of the rank.

    Attributes:
        result: the pickled value of the rank, once :meth:`wait` has returned None.
    """

    def __init__(self, rank: int) -> None:
        self.result: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=RESULT_BYTES)  # noqa: SIM115 - outlives this
        self._rank = rank
        self._stop_reason: StopReason | None = None
        self._changed = threading.Event()

    def close(self) -> None:
        """End the rank, and release its value."""
        self.result.close()

    @abstractmethod
    def begin(self, job: RankJob, member: int | None = None) -> None:
        """Have the rank begin, unless it was stopped.

        Args:
            job: the job, which the rank joins as the rank it is there.
            member: number of the rank as a member of an elastic launch; None for any other launch.
        """

    def health(self) -> RankHealth:
        """The rank's health; the default if it is not known. Safe from any thread."""
        return RankHealth()

    def stop(self, reason: StopReason) -> None:
        """Have :meth:`wait` end the rank, for this reason. Safe from any thread."""
        if self._stop_reason is None:
            self._stop_reason = reason
        self._changed.set()

    def cancel(self, reason: StopReason) -> None:
        """As :meth:`stop`, on request of the driver and not because another rank has failed."""
        self.stop(reason)

    @abstractmethod
    def wait(self) -> Failure | None:
        """Wait until the rank has ended or was stopped; return its failure, None if it has ended well."""

    def _failure_of_stop(
        self, reason: StopReason, health: RankHealth | None = None, stack: str = ""
    ) -> Failure:
        return Failure(
            rank=self._rank,
            error=str(reason),
            traceback="",
            is_consequence=True,
            is_hang=reason.is_hang,
            health=health,
            stack=stack,
        )


HELD_OUTPUT = (
    "A process started by this rank still holds the output of the rank open; further output is not shown."
)
NOT_ENDED = (
    "This rank's process could not be ended: it waits in the kernel for a disk, a network or a GPU that does not "
    "answer. Look at its host."
)


class RankSupervisor(Supervisor):
    """One rank process that runs a function, and the threads that receive from it.

    Entering the context starts the process.

    The rank calls its function after :meth:`begin`.

    Args:
        rank: number of the rank.
        payload: the pickled function with its arguments.
        environment: environment variables of the process and of its forkserver.
        more_variables: further environment variables, of this launch alone.
        modules: modules that the forkserver imports before it forks the rank.
        inherited: file descriptors that the process inherits, by the environment variables that hold their numbers.
        on_start: called from a thread once the process runs.
        on_line: called from one thread with each line that the rank prints.
        on_event: called from one thread with each event that the rank reports.
    """

    def __init__(
        self,
        *,
        rank: int,
        payload: bytes,
        environment: Mapping[str, str],
        more_variables: Mapping[str, str] | None = None,
        modules: Sequence[str] = (),
        inherited: Mapping[str, int] | None = None,
        on_start: Callable[[], None] = lambda: None,
        on_line: Callable[[str], None],
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(rank)
        self._payload = payload
        self._environment, self._more_variables = environment, more_variables or {}
        self._modules, self._inherited = modules, inherited or {}
        self._on_start = on_start
        self._on_line, self._on_event = on_line, on_event
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._error_chunks: list[bytes] = []
        self._failure: Failure | None = None
        self._awaits_exception = False
        """Whether the rank has described its exception, but not yet sent it."""
        self._returned = threading.Event()
        self._heartbeat: dict[str, Any] | None = None
        self._received_at = math.inf
        self._has_begun = self._is_ended = False
        self._outbox: queue.SimpleQueue[tuple[dict[str, Any], bytes | memoryview] | None] = (
            queue.SimpleQueue()
        )

    def __enter__(self) -> Self:
        ours, theirs = socket.socketpair()
        self._connection = MessageConnection(ours)
        self._stacks = StackFile()
        with theirs, ExitStack() as stack:
            stack.callback(self._connection.close)
            stack.callback(self._stacks.close)
            self._process = ForkedRank(
                environment=self._environment,
                more_variables=self._more_variables,
                modules=self._modules,
                name=f"sparkdl-rank-{self._rank}"[:15],
                task=theirs.fileno(),
                stacks=self._stacks.fd,
                inherited=self._inherited,
                on_start=self._note_start,
                on_exit=self._changed.set,
            )
            stack.callback(self._process.end, grace_s=0.0)
            name = f"sparkdl-rank-{self._rank}"
            self._lines = OutputRelay(
                self._process.output,
                on_line=self._take_line,
                on_error=self._fail,
                name=name,
                max_bytes=CHUNK_BYTES,
            )
            self._threads = [
                threading.Thread(target=target, name=name, daemon=True)
                for target in (self._relay_messages, self._send_outbox)
            ]
            for thread in self._threads:
                thread.start()
            stack.pop_all()
        view = memoryview(self._payload)
        for start in range(0, len(view), CHUNK_BYTES):
            self._outbox.put(({"kind": "payload"}, view[start : start + CHUNK_BYTES]))
        self._outbox.put(({"kind": "unpickle"}, b""))
        return self

    def close(self) -> None:
        """End the rank at once: it ends with the task, even if Spark kills the task."""
        self._end(grace_s=0.0)
        super().close()
        self._stacks.close()

    @property
    def pid(self) -> int:
        """Process id of the rank."""
        return self._process.pid

    def begin(self, job: RankJob, member: int | None = None) -> None:
        """Have the rank call its function, unless it was stopped; see :meth:`Supervisor.begin`."""
        if self._stop_reason is not None:
            return
        self._has_begun = True
        self._outbox.put(({"kind": "start", "job": job.to_variables(), "member": member}, b""))

    def health(self) -> RankHealth:
        """The rank's health; the default once its function has returned or its process has ended.

        Safe from any thread.
        """
        if self._returned.is_set() or self._process.exited.is_set():
            return RankHealth()
        heartbeat = self._heartbeat or {"waits": (), "idle_s": None, "world": 0}
        return RankHealth.from_fields(
            {
                "silent_s": max(0.0, time.monotonic() - self._received_at),
                "state": process_state(self.pid) if self._received_at < math.inf else "",
                **{name: heartbeat[name] for name in ("waits", "idle_s", "world")},
            }
        )

    def wait(self) -> Failure | None:
        """Wait until the rank has ended or was stopped; return its failure, None if its function has returned."""
        if not self._changed.wait(START_TIMEOUT_S) and not self._process.start_is_decided.is_set():
            return self._end_unstarted()
        self._changed.wait()
        reason = self._stop_reason
        if reason is not None and reason.is_hang and not self._returned.is_set() and self._failure is None:
            return self._end_hanging(reason)
        health, stack = self.health(), ""
        if self._has_begun:
            is_patient = self._returned.is_set() or self._awaits_exception
            self._process.exited.wait(EXIT_GRACE_S if is_patient else ABORT_GRACE_S)
        if self._stop_reason is not None and not self._returned.is_set():
            stack = self._take_stack()
        self._end(grace_s=1.0)
        if self._failure is not None:
            return self._failure
        if self._returned.is_set():
            return None
        if self._stop_reason is not None:
            return self._failure_of_stop(self._stop_reason, health, stack)
        if self._process.refusal is not None:
            why, output = self._process.refusal
            return Failure(
                rank=self._rank, error=f"its process could not be started: {why}", traceback=output
            )
        status = self._process.status
        assert status is not None, "it has just been ended"
        early = " before its function returned" if status >= 0 else ""
        position = self._stacks.position()
        return Failure(
            rank=self._rank,
            error=f"its process {describe_exit(status)}{early}{f' in {position}' if position else ''}",
            traceback="".join(f"{line}\n" for line in self._last_lines),
            # A process that exits by itself would do so again.
            is_loss=status < 0,
        )

    def _end_unstarted(self) -> Failure:
        """Stop waiting for the forkserver, which has not forked the rank in time."""
        state, output = self._process.examine_forkserver()
        self._end(grace_s=0.0)
        return Failure(
            rank=self._rank,
            error=f"its process had not started after {START_TIMEOUT_S:g} s, as its forkserver "
            f"{state or 'is still importing modules'}: check the disk that holds the Python packages",
            traceback=output,
        )

    def _end_hanging(self, reason: StopReason) -> Failure:
        """End the rank because a rank hangs. A stopped process, which the stack signal resumes, is ended as well."""
        health = self.health()
        stack = (
            self._take_stack()
            if self._process.start_is_decided.is_set()
            else self._process.examine_forkserver()[1]
        )
        self._end(grace_s=0.0)
        return self._failure_of_stop(reason, health, stack)

    def _end(self, *, grace_s: float) -> None:
        if self._is_ended:
            return
        self._process.end(grace_s=grace_s)
        self._is_ended = True
        is_complete = self._lines.finish(Deadline(LAST_LINES_TIMEOUT_S), is_patient=True)
        if not is_complete and self._process.has_started:
            self._on_line(HELD_OUTPUT)
        self._outbox.put(None)
        has_ended = self._process.exited.is_set()
        if not has_ended:
            self._on_line(NOT_ENDED)
        timeout_s = RELAY_TIMEOUT_S if has_ended else 0.0
        receiving, sending = self._threads
        receiving.join(timeout_s)
        self._connection.close()
        sending.join(timeout_s)

    def _note_start(self) -> None:
        self._received_at = time.monotonic()
        self._on_start()

    def _take_stack(self) -> str:
        """The rank's current stacks; empty if it has ended or never sent a heartbeat."""
        heartbeat = self._heartbeat
        if heartbeat is None or self._process.exited.is_set():
            return ""
        return self._stacks.take(self.pid, heartbeat["threads"])

    def _send_outbox(self) -> None:
        # In a thread: a process that still imports does not receive, and the task must not wait for it.
        while (message := self._outbox.get()) is not None:
            try:
                self._connection.send(*message)
            except OSError:
                return  # the process died at its start, which wait() reports

    def _fail(self, error: Exception) -> None:
        # No more messages of the rank are received, so it would block, and the other ranks with it.
        self._failure = Failure(
            rank=self._rank,
            error=f"its task could not take what it sent: {type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(error)),
        )
        self._changed.set()

    def _take_line(self, raw: bytes) -> None:
        # A line longer than CHUNK_BYTES arrives in parts.
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        self._last_lines.append(split_mark(line)[1])
        self._on_line(line)

    def _relay_messages(self) -> None:
        try:
            while (message := self._connection.receive()) is not None:
                self._received_at = math.inf  # no heartbeat is received while this message is passed on
                self._take(*message)
                self._received_at = time.monotonic()
        except Exception as error:
            self._fail(error)

    def _take(self, header: dict[str, Any], body: memoryview) -> None:
        if header["kind"] == "heartbeat":
            self._heartbeat = header
        elif header["kind"] == "event":
            self._on_event(header["event"])
        elif header["kind"] == "result":
            # A large result goes to a file.
            with errors_as(
                LaunchError,
                f"the value that its function returned cannot be written to {tempfile.gettempdir()!r}",
                "Free space there, or set TMPDIR to another folder.",
                of=OSError,
            ):
                self.result.write(body)
        elif header["kind"] == "returned":
            self._returned.set()
            self._changed.set()
        elif header["kind"] == "error":
            self._error_chunks.append(bytes(body))
        elif header["kind"] == "raised":
            self._failure = Failure(rank=self._rank, **header["failure"])
            self._awaits_exception = True
        elif header["kind"] == "failure":
            pickled = b"".join(self._error_chunks)
            self._failure = Failure(rank=self._rank, pickled=pickled, **header["failure"])
            self._awaits_exception = False
