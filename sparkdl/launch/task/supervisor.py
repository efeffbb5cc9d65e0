"""Starts one rank process, passes on its output line by line, and ends it on request.

Runs in the barrier task; :class:`OutputRelay` runs wherever ranks are started. The process is started with its
function before the tasks have met, so that it imports what the function needs meanwhile, unless the process that it
is forked from has already imported it. The rank's place among the ranks is sent afterwards.
"""

from __future__ import annotations

import math
import queue
import socket
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import IO, Any

from sparkdl.collective import Deadline
from sparkdl.launch.forkserver.forked_rank import ForkedRank
from sparkdl.launch.forkserver.guard import how_it_ended
from sparkdl.launch.rank.pulse import StackFile, process_state
from sparkdl.launch.wire.messages import CHUNK_BYTES, MessageConnection, split_mark
from sparkdl.launch.wire.outcome import Failure, RankSigns, StopReason

_LOOK_S = 0.05
"""Between two looks at whether a reader still takes a line, which lengthens the wait for the last one."""


class OutputRelay:
    """Reads one stream of a rank to its end, from a thread of its own.

    Args:
        output: our end of the stream's pipe; closed at its end.
        on_line: called with each line.
        on_error: called with what ``on_line`` raised, after which nothing is passed on any more.
        name: of the thread.
        max_bytes: of a line; a longer one is passed on in pieces. Any, when negative.
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
        """Wait for the last line of a rank that has ended; False if somebody still holds its stream open.

        Args:
            deadline: until when that is waited for.
            is_patient: wait longer while ``on_line`` takes a line: whoever reads may have stopped for a while.
        """
        while self._thread.is_alive():
            if deadline.expired and (self._awaits_line or not is_patient):
                self._is_over = True
                return not self._awaits_line
            self._thread.join(_LOOK_S)
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
                # Nobody takes what the rank says any more, so it would block, and the others with it.
                self._on_error(error)


LAST_LINES = 40
"""How many of a rank's last log lines stand in for a traceback when it died without one."""

START_TIMEOUT_S = 600.0
"""How long what a rank is forked from may import: minutes from a slow network drive, but not for ever."""

EXIT_GRACE_S = 10.0
"""How long a rank that has returned may take to end by itself: it may have started threads that never do.

And one that has raised an exception to pickle it.
"""

ABORT_GRACE_S = 3.0
"""How long a rank may take to notice that another one failed, and say where it was, before it is ended."""

RELAY_TIMEOUT_S = 30.0
"""How long the result of a rank that has ended may take to be written down."""

LAST_LINES_TIMEOUT_S = 2.0
"""How long nothing may come of a rank that has ended before it is taken that somebody else holds its output open."""

SPOOL_BYTES = 64 << 20
"""Results up to this size stay in the task's memory; larger ones wait in a temporary file."""


class RankSupervisor:
    """One rank process and the threads that listen to it; a context manager that starts and ends them.

    The function is called after :meth:`begin`.

    Args:
        rank: number of the rank.
        payload: the pickled function with its arguments.
        environment: variables of the process.
        more_variables: variables that are those of this launch alone.
        modules: what the process has imported before it is this rank.
        inherited: file descriptors that it inherits, by the variables that tell it their numbers.
        on_start: called once the process is there, from a thread.
        on_line: called with each line that it prints, from one thread.
        on_event: called with each event that it reports, from one thread.
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
        self.result: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115 - outlives this
        self._rank, self._payload = rank, payload
        self._environment, self._more_variables = environment, more_variables or {}
        self._modules, self._inherited = modules, inherited or {}
        self._on_start = on_start
        self._on_line, self._on_event = on_line, on_event
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._error_chunks: list[bytes] = []
        self._failure: Failure | None = None
        self._is_telling = False
        """Whether the rank has told what it raised, but not yet the exception itself."""
        self._returned = threading.Event()
        self._stop_reason: StopReason | None = None
        self._pulse: dict[str, Any] | None = None
        self._heard_at = math.inf
        self._news = threading.Event()
        self._has_begun = self._is_ended = False
        self._start = Deadline(START_TIMEOUT_S)
        self._orders: queue.SimpleQueue[tuple[dict[str, Any], bytes | memoryview] | None] = (
            queue.SimpleQueue()
        )

    def __enter__(self) -> RankSupervisor:
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
                on_exit=self._news.set,
            )
            stack.callback(self._process.end, grace_s=0.0)
            name = f"sparkdl-rank-{self._rank}"
            self._lines = OutputRelay(
                self._process.output,
                on_line=self._take_line,
                on_error=self._give_up,
                name=name,
                max_bytes=CHUNK_BYTES,
            )
            self._threads = [
                threading.Thread(target=target, name=name, daemon=True)
                for target in (self._relay_messages, self._send_orders)
            ]
            for thread in self._threads:
                thread.start()
            stack.pop_all()
        view = memoryview(self._payload)
        for start in range(0, len(view), CHUNK_BYTES):
            self._orders.put(({"kind": "payload"}, view[start : start + CHUNK_BYTES]))
        self._orders.put(({"kind": "unpickle"}, b""))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Whatever ends the task, a Spark kill among it, ends the rank.
        self._end(grace_s=0.0)
        self.result.close()
        self._stacks.close()

    @property
    def pid(self) -> int:
        """Process id of the rank."""
        return self._process.pid

    def begin(self, order: Mapping[str, Any]) -> None:
        """Have the rank call its function, unless it was stopped; the order is what it has to know apart from that."""
        if self._stop_reason is not None:
            return
        self._has_begun = True
        self._orders.put(({"kind": "start", **order}, b""))

    def signs(self) -> RankSigns:
        """What is known of the rank from outside; nothing once it has returned or ended. Safe from any thread."""
        if self._returned.is_set() or self._process.exited.is_set():
            return RankSigns()
        pulse = self._pulse or {"waits": (), "idle_s": None}
        silent_s = max(0.0, time.monotonic() - self._heard_at)
        has_place = self._heard_at < math.inf
        state = process_state(self.pid) if has_place else ""
        fields = {"silent_s": silent_s, "state": state, "waits": pulse["waits"], "idle_s": pulse["idle_s"]}
        return RankSigns.from_fields(fields)

    def stop(self, reason: StopReason) -> None:
        """Have :meth:`wait` end the rank, because ``reason``. Safe from any thread."""
        if self._stop_reason is None:
            self._stop_reason = reason
        self._news.set()

    def wait(self) -> Failure | None:
        """Wait until the rank has ended by itself or was stopped; None when its function returned.

        The value is then in ``result``, pickled.
        """
        if not self._news.wait(self._start.remaining_s()) and not self._process.is_settled:
            return self._end_unborn()
        self._news.wait()
        reason = self._stop_reason
        if reason is not None and reason.is_hang and not self._returned.is_set() and self._failure is None:
            return self._end_hanging(reason)
        signs, stack = self.signs(), ""
        if self._has_begun:
            is_patient = self._returned.is_set() or self._is_telling
            self._process.exited.wait(EXIT_GRACE_S if is_patient else ABORT_GRACE_S)
        if self._stop_reason is not None and not self._returned.is_set():
            stack = self._take_stack()
        self._end(grace_s=1.0)
        if self._failure is not None:
            return self._failure
        if self._returned.is_set():
            return None
        if self._stop_reason is not None:
            return self._stopped(self._stop_reason, signs, stack)
        if self._process.refusal is not None:
            why, said = self._process.refusal
            return Failure(rank=self._rank, error=f"its process could not be started: {why}", traceback=said)
        status = self._process.status
        assert status is not None, "it has just been ended"
        unasked = " before its function returned" if status >= 0 else ""
        place = self._stacks.place()
        return Failure(
            rank=self._rank,
            error=f"its process {how_it_ended(status)}{unasked}{f' in {place}' if place else ''}",
            traceback="".join(f"{line}\n" for line in self._last_lines),
            # It left by itself otherwise, which it would do again.
            is_loss=status < 0,
        )

    def _end_unborn(self) -> Failure:
        """Part with what should have forked the rank and has not."""
        state, said = self._process.locate_nursery()
        self._end(grace_s=0.0)
        return Failure(
            rank=self._rank,
            error=f"its process was not there after {self._start.timeout_s:g} s, as what it is forked from "
            f"{state or 'still imports'}: look at the disk that Python's packages are on",
            traceback=said,
        )

    def _end_hanging(self, reason: StopReason) -> Failure:
        """End the rank where it is. That the signal for its stack may wake it does not count any more."""
        signs = self.signs()
        stack = self._take_stack() if self._process.is_settled else self._process.locate_nursery()[1]
        self._end(grace_s=0.0)
        return self._stopped(reason, signs, stack)

    def _stopped(self, reason: StopReason, signs: RankSigns, stack: str) -> Failure:
        return Failure(
            rank=self._rank,
            error=str(reason),
            traceback="",
            is_consequence=True,
            is_hang=reason.is_hang,
            signs=signs,
            stack=stack,
        )

    def _end(self, *, grace_s: float) -> None:
        if self._is_ended:
            return
        self._process.end(grace_s=grace_s)
        self._is_ended = True
        is_complete = self._lines.finish(Deadline(LAST_LINES_TIMEOUT_S), is_patient=True)
        if not is_complete and self._process.was_there:
            self._on_line(
                "What this rank left running, in a session of its own, still holds its output open; no more is shown."
            )
        self._orders.put(None)
        has_ended = self._process.exited.is_set()
        if not has_ended:
            self._on_line(
                "This rank's process could not be ended: it waits in the kernel for a disk, a network or a GPU that "
                "does not answer. Look at its host."
            )
        timeout_s = RELAY_TIMEOUT_S if has_ended else 0.0
        receiving, sending = self._threads
        receiving.join(timeout_s)
        self._connection.close()
        sending.join(timeout_s)

    def _note_start(self) -> None:
        self._heard_at = time.monotonic()
        self._on_start()

    def _take_stack(self) -> str:
        """Where the rank is at the moment; nothing if it has ended, or never gave a sign of life."""
        pulse = self._pulse
        if pulse is None or self._process.exited.is_set():
            return ""
        return self._stacks.take(self.pid, pulse["threads"])

    def _send_orders(self) -> None:
        # From a thread, as a process that imports yet takes nothing, while the task has more to do.
        while (order := self._orders.get()) is not None:
            try:
                self._connection.send(*order)
            except OSError:
                return  # it died at its start; wait() tells how

    def _give_up(self, error: Exception) -> None:
        # Nobody takes what the rank says any more, so it would block, and the others with it.
        self._failure = Failure(
            rank=self._rank,
            error=f"its task could not take what it said: {type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(error)),
        )
        self._news.set()

    def _take_line(self, raw: bytes) -> None:
        # A line without an end arrives in pieces.
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        self._last_lines.append(split_mark(line)[1])
        self._on_line(line)

    def _relay_messages(self) -> None:
        try:
            self._take_messages()
        except Exception as error:
            self._give_up(error)

    def _take_messages(self) -> None:
        while (message := self._connection.receive()) is not None:
            self._heard_at = math.inf  # as long as it takes to pass on what it said, it cannot say any more
            header, body = message
            if header["kind"] == "pulse":
                self._pulse = header
            elif header["kind"] == "event":
                self._on_event(header["event"])
            elif header["kind"] == "result":
                self.result.write(body)
            elif header["kind"] == "returned":
                self._returned.set()
                self._news.set()
            elif header["kind"] == "error":
                self._error_chunks.append(bytes(body))
            elif header["kind"] == "raised":
                self._failure = Failure(rank=self._rank, **header["failure"])
                self._is_telling = True
            elif header["kind"] == "failure":
                pickled = b"".join(self._error_chunks)
                self._failure = Failure(rank=self._rank, pickled=pickled, **header["failure"])
                self._is_telling = False
            self._heard_at = time.monotonic()
