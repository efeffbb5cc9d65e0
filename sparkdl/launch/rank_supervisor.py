"""Starts one rank process, relays what it says and ends it when told to. Runs in the barrier task."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, Any

from sparkdl.launch.messages import CHUNK_BYTES, MessageConnection
from sparkdl.launch.outcome import Failure
from sparkdl.launch.process_guard import ProcessGuard, end_process_group

LAST_LINES = 40
"""How many of a rank's last log lines stand in for a traceback when it died without one."""

ABORT_GRACE_S = 3.0
"""How long a rank may take to notice that another one failed, before it is killed."""

SPOOL_BYTES = 64 << 20
"""Results up to this size stay in the task's memory; larger ones wait in a temporary file."""


class RankSupervisor:
    """One rank process and the threads that listen to it.

    Args:
        order: what the rank is told, apart from its function.
        payload: the pickled function with its arguments.
        environment: variables of the process.
        pass_fds: further file descriptors that it inherits.
        on_line: called with each line that it prints, from one thread.
        on_event: called with each event that it reports, from one thread.
    """

    def __init__(
        self,
        *,
        order: Mapping[str, Any],
        payload: bytes,
        environment: Mapping[str, str],
        pass_fds: Sequence[int],
        on_line: Callable[[str], None],
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self.result: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115 - outlives this
        self._on_line, self._on_event = on_line, on_event
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._failure: Failure | None = None
        self._done = False
        self._exited = threading.Event()
        self._happenings: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._rank = int(order["rank"])
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sparkdl.launch.rank_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                pass_fds=(theirs.fileno(), *pass_fds),
                # A group of its own, so that whatever the rank starts can be ended with it.
                start_new_session=True,
            )
        finally:
            theirs.close()
        self._guard = ProcessGuard(self.pid)
        self._connection = MessageConnection(ours)
        self._threads = [
            threading.Thread(target=target, name=f"sparkdl-rank-{self._rank}-{name}", daemon=True)
            for name, target in (("log", self._relay_lines), ("messages", self._relay_messages))
        ]
        for thread in self._threads:
            thread.start()
        threading.Thread(target=self._await_exit, name="sparkdl-rank-exit", daemon=True).start()
        self._send_order(order, payload)

    @property
    def pid(self) -> int:
        """Process id of the rank."""
        return self._process.pid

    def stop(self, reason: str) -> None:
        """Have :meth:`wait` end the rank, because ``reason``. Safe from any thread."""
        self._happenings.put(reason)

    def wait(self) -> Failure | None:
        """Wait until the rank has ended by itself or was stopped; None when its function returned.

        The value is then in ``result``, pickled.
        """
        reason = self._happenings.get()
        if reason is not None:
            # The other ranks were aborted too: give this one the time to say where it was.
            self._exited.wait(ABORT_GRACE_S)
        self._end(grace_s=1.0)
        for thread in self._threads:
            thread.join(5.0)
        self._connection.close()
        if self._failure is not None:
            return self._failure
        if self._done and self._process.returncode == 0:
            return None
        if reason is not None:
            return Failure(rank=self._rank, error=reason, traceback="", is_consequence=True)
        return Failure(
            rank=self._rank,
            error=f"its process {_how_it_ended(self._process.returncode)}",
            traceback="".join(f"{line}\n" for line in self._last_lines),
        )

    def __enter__(self) -> RankSupervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Whatever ends the task, a Spark kill among it, ends the rank.
        self._end(grace_s=0.0)
        self.result.close()

    def _end(self, *, grace_s: float) -> None:
        if self._process.returncode is None:  # not reaped, so the number is still this process's
            end_process_group(self.pid, self._exited, grace_s=grace_s)
            self._exited.wait()  # reaping it earlier would leave the waiting thread without a child
            self._guard.release()
            self._process.wait()

    def _send_order(self, order: Mapping[str, Any], payload: bytes) -> None:
        view = memoryview(payload)
        try:
            for start in range(0, len(view), CHUNK_BYTES):
                self._connection.send({"kind": "payload"}, view[start : start + CHUNK_BYTES])
            self._connection.send({"kind": "start", **order})
        except OSError:
            pass  # it died at its start; wait() tells how

    def _relay_lines(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            self._last_lines.append(line)
            self._on_line(line)

    def _relay_messages(self) -> None:
        while (message := self._connection.receive()) is not None:
            header, body = message
            if header["kind"] == "event":
                self._on_event(header["event"])
            elif header["kind"] == "result":
                self.result.write(body)
            elif header["kind"] == "done":
                self._done = True
            elif header["kind"] == "failure":
                self._failure = Failure(
                    rank=self._rank,
                    error=header["error"],
                    traceback=header["traceback"],
                    is_consequence=header["is_consequence"],
                    pickled=bytes(body),
                )

    def _await_exit(self) -> None:
        # Not reaped yet: its number must stay taken until its process group has been ended.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self._exited.set()
        self._happenings.put(None)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"exited with status {status} before its function returned"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
