"""The connections between the barrier tasks and the driver, at both ends.

:class:`DriverLink` is the end of a barrier task. It sends log lines, events and failures, and receives the addresses
of the other tasks and the request to stop. On Spark Connect the executors may not reach the driver's machine. The log
lines are then kept and returned with the result.

:class:`DriverChannel` is the end of the driver. It receives log lines, events and failures, exchanges the addresses of
the tasks, and cancels. It accepts only tasks that prove that they know the job's secret. Messages are handed to the
caller's own thread, in order per rank; when that thread is slow the tasks wait, so that nothing is dropped and no
backlog builds up.
"""

from __future__ import annotations

import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Any

from sparkdl.closing import Closing
from sparkdl.launch.wire.messages import MessageConnection
from sparkdl.launch.wire.outcome import Failure, HealthReport, OnStop, RankHealth, StopReason
from sparkdl.rendezvous.addresses import Address
from sparkdl.rendezvous.dialing import connect_authenticated
from sparkdl.rendezvous.listener import AuthenticatedListener

PURPOSE = b"sparkdl driver"
REACH_TIMEOUT_S = 10.0
UNSENT_BYTES = 8 << 20

OnPeers = Callable[[list[dict[str, Any]] | None], None]


class DriverLink:
    """The barrier task's end of its connection to the driver, for one rank; a context manager."""

    def __init__(self, address: Address, secret: bytes, *, rank: int, host: str) -> None:
        self.unsent: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=UNSENT_BYTES)  # noqa: SIM115 - closed below
        self._address, self._secret = address, secret
        self._hello = {"kind": "hello", "rank": rank, "host": host}
        self._connection: MessageConnection | None = None
        self._lock = threading.Lock()
        self._on_peers: OnPeers | None = None
        self._on_stop: OnStop | None = None
        self._stop_reason: StopReason | None = None
        self._is_answered = threading.Event()

    def __enter__(self) -> DriverLink:
        try:
            sock = connect_authenticated(
                self._address, self._secret, purpose=PURPOSE, timeout_s=REACH_TIMEOUT_S
            )
        except OSError:
            return self  # out of reach, or another machine here has its address: log lines are kept
        self._connection = MessageConnection(sock)
        self._send(self._hello)
        threading.Thread(
            target=self._listen, args=(self._connection,), name="sparkdl-driver-watch", daemon=True
        ).start()
        # Wait until it is known whether the launch was already cancelled: its rank must then not begin.
        self._is_answered.wait(REACH_TIMEOUT_S)
        return self

    def meet(self, mine: dict[str, Any], on_peers: OnPeers) -> None:
        """Exchange data with the other tasks through the driver.

        Args:
            mine: data of this task, in types that JSON can encode.
            on_peers: called from a thread with the data of all tasks, in order of rank; or with None if a task cannot
                reach the driver, so that all tasks have to exchange their data through Spark. If this task cannot reach
                the driver, it is called at once.
        """
        with self._lock:
            self._on_peers = on_peers
        if self._connection is None:
            on_peers(None)
        else:
            self._send({"kind": "meet", "peer": mine})

    def watch(self, on_stop: OnStop) -> None:
        """Call ``on_stop`` with the reason when the driver cancels or is gone.

        The call comes from a thread, or at once if the driver has already cancelled. ``on_stop`` replaces the callback
        of an earlier call.
        """
        with self._lock:
            self._on_stop, reason = on_stop, self._stop_reason
        if reason is not None:
            on_stop(reason)

    @property
    def is_stopped(self) -> bool:
        """Whether the driver has cancelled or is gone."""
        return self._stop_reason is not None

    def line(self, text: str) -> None:
        """Pass on one line that the rank printed."""
        if not self._send({"kind": "log"}, text.encode()):
            self.unsent.write(text.encode() + b"\n")

    def event(self, event: dict[str, Any]) -> None:
        """Pass on an event that the rank reported; lost when the driver is out of reach."""
        self._send({"kind": "event", "event": event})

    def report_start(self) -> None:
        """Report that the rank process runs."""
        self._send({"kind": "started"})

    def heartbeat(self, number: int, health: RankHealth) -> bool:
        """Report that this task runs, and the health of its rank; False if the driver is out of reach."""
        return self._send({"kind": "health", "number": number, "health": asdict(health)})

    def failure(self, failure: Failure) -> None:
        """Report a failure at once, in case this task is killed before it can yield it."""
        self._send({"kind": "failure"}, failure.to_json())

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._send({"kind": "goodbye"})
            self._connection.close()
        self.unsent.close()

    def _send(self, header: dict[str, Any], body: bytes = b"") -> bool:
        if self._connection is None:
            return False
        try:
            self._connection.send(header, body)
        except OSError:
            return False
        return True

    def _listen(self, connection: MessageConnection) -> None:
        while (message := connection.receive_while_heard()) is not None:
            header, _ = message
            if header["kind"] == "stop":
                self._stop(StopReason(header["reason"], is_hang=header["is_hang"]))
            elif header["kind"] == "peers" and self._on_peers is not None:
                self._on_peers(header["peers"])
            elif header["kind"] == "meet by spark" and self._on_peers is not None:
                self._on_peers(None)
            self._is_answered.set()
        self._stop(StopReason("the driver is gone"))
        self._is_answered.set()

    def _stop(self, reason: StopReason) -> None:
        with self._lock:
            if self._stop_reason is not None:
                return
            self._stop_reason, on_stop = reason, self._on_stop
        if on_stop is not None:
            on_stop(reason)


MAX_WAITING_MESSAGES = 10_000
MEETING_TIMEOUT_S = REACH_TIMEOUT_S + 5.0
"""How long to wait for the other tasks once one has connected: longer than a task tries to reach the driver."""


@dataclass(frozen=True, kw_only=True)
class RankMessage:
    """A log line or an event of a rank."""

    rank: int
    line: str | None = None
    event: dict[str, Any] | None = None


_MEET_BY_SPARK = {"kind": "meet by spark"}
_WELCOME = {"kind": "welcome"}
"""The first message to a task, unless it has to stop."""


def _stop_message(reason: StopReason) -> dict[str, Any]:
    return {"kind": "stop", "reason": str(reason), "is_hang": reason.is_hang}


class DriverChannel(Closing):
    """Listens for the tasks of one job; a context manager.

    Args:
        secret: secret of the job.
        num_ranks: number of tasks that are to meet.
        host: address or addresses to bind, as found by :func:`~sparkdl.launch.spark_job.driver_hosts`; when None, the
            choice of :func:`~sparkdl.rendezvous.addresses.reachable_hosts`.

    Attributes:
        address: address at which the tasks reach the driver.
        started: ranks whose process has been started.
        lost: ranks whose tasks have gone without a goodbye. Spark may run such a task again.
        takes_messages: whether log lines and events are kept for :meth:`next_message`. Set to False, they are dropped,
            because no thread takes them any more, and the tasks would wait.
    """

    def __init__(self, secret: bytes, num_ranks: int, *, host: str | Sequence[str] | None = None) -> None:
        self._num_ranks = num_ranks
        self._messages: queue.Queue[RankMessage | None] = queue.Queue(MAX_WAITING_MESSAGES)
        self._lock = threading.Condition()
        self.started: set[int] = set()
        self.lost: list[int] = []
        self._hosts: dict[int, str] = {}
        self._failures: list[Failure] = []
        self._health: dict[int, HealthReport] = {}
        self._peers: dict[int, tuple[MessageConnection, Any]] = {}
        """The data that tasks exchange, by rank."""
        self._meets_here = True
        """Whether the tasks can meet through the driver. False once a task has left, was restarted, or has not
        connected in time, for example because it cannot reach the driver; all tasks then meet through Spark."""
        self._meeting: list[MessageConnection] = []
        """Connections of all tasks that want to meet, also those of earlier attempts of the stage."""
        self._connections: set[MessageConnection] = set()
        self._cancelled: StopReason | None = None
        self._closed = False
        self.takes_messages = True
        self._meeting_timer: threading.Timer | None = None
        self._listener = AuthenticatedListener(
            secret, purpose=PURPOSE, host=host, on_connection=self._serve_in_thread
        )
        self.address = self._listener.address

    @property
    def failures(self) -> list[Failure]:
        """Failures in the order in which they were reported, followed by one for each task that was lost."""
        with self._lock:
            lost = [
                Failure(
                    rank=rank,
                    host=self._hosts[rank],
                    error="its executor or Python worker was lost",
                    is_loss=True,
                    traceback="",
                )
                for rank in self.lost
            ]
            return self._failures + lost

    @property
    def hosts(self) -> dict[int, str]:
        """The hosts of the ranks whose tasks have connected."""
        with self._lock:
            return dict(self._hosts)

    @property
    def health(self) -> dict[int, HealthReport]:
        """The latest report on each rank whose task is connected."""
        with self._lock:
            return dict(self._health)

    def next_message(self, timeout_s: float) -> RankMessage | None:
        """Wait for the next log line or event; None if there is none in time, or none when :meth:`wake` is called."""
        try:
            message = self._messages.get(timeout=timeout_s)
            while message is None:  # woken: lines may have come since
                message = self._messages.get_nowait()
            return message
        except queue.Empty:
            return None

    def wake(self) -> None:
        """Have the thread that waits for a message, or does so next, go on without one."""
        with suppress(queue.Full):  # it does not wait, then
            self._messages.put_nowait(None)

    def wait_until_disconnected(self, timeout_s: float) -> bool:
        """Wait until every task has closed its connection, so that all last lines were received; return whether so."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._connections, timeout_s)

    def cancel(self, reason: StopReason) -> None:
        """Make every task end its rank, also tasks that connect from now on."""
        with self._lock:
            self._cancelled = reason
            connections = list(self._connections)
        for connection in connections:
            self._send(connection, _stop_message(reason))

    def close(self) -> None:
        """Stop listening, and close the connections of all tasks."""
        self._listener.close()
        with self._lock:
            if self._meeting_timer is not None:
                self._meeting_timer.cancel()
            self._closed = True
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    def _serve_in_thread(self, sock: socket.socket) -> None:
        connection = MessageConnection(sock)
        with self._lock:
            self._connections.add(connection)
            cancelled = self._cancelled
        self._send(connection, _WELCOME if cancelled is None else _stop_message(cancelled))
        threading.Thread(target=self._serve, args=(connection,), name="sparkdl-driver", daemon=True).start()

    def _serve(self, connection: MessageConnection) -> None:
        rank, said_goodbye = -1, False
        try:
            while not said_goodbye and (message := connection.receive()) is not None:
                header, body = message
                kind = header["kind"]
                self._note_contact(rank)
                if kind == "log":
                    self._hand_over(RankMessage(rank=rank, line=str(body, "utf-8", "replace")))
                elif kind == "event":
                    self._hand_over(RankMessage(rank=rank, event=header["event"]))
                elif kind == "meet":
                    self._meet(connection, rank, header["peer"])
                elif kind == "goodbye":
                    said_goodbye = True
                elif kind == "hello":
                    rank = int(header["rank"])
                    self._note(rank, header, body)
                else:
                    self._note(rank, header, body)
        finally:
            with self._lock:
                if rank >= 0 and not said_goodbye:
                    self.lost.append(rank)
                if rank in self._peers:
                    self._meets_here = False
                self._health.pop(rank, None)
                self._connections.discard(connection)
                is_last = not self._connections
                self._lock.notify_all()
            connection.close()
            if is_last:
                self.wake()

    def _note(self, rank: int, header: dict[str, Any], body: memoryview) -> None:
        """Note what a task has reported about itself and its rank."""
        with self._lock:
            if header["kind"] == "hello":
                self._hosts[rank] = header["host"]
                self._health[rank] = HealthReport(time.monotonic(), 0, RankHealth())
            elif header["kind"] == "started":
                self.started.add(rank)
            elif header["kind"] == "failure":
                self._failures.append(Failure.from_json(bytes(body)))
            elif header["kind"] == "health":
                health = RankHealth.from_fields(header["health"])
                self._health[rank] = HealthReport(time.monotonic(), header["number"], health)

    def _note_contact(self, rank: int) -> None:
        """Note that a task is alive: it sends messages, or waits to do so."""
        with self._lock:
            if rank in self._health:
                self._health[rank] = self._health[rank]._replace(received_at=time.monotonic())

    def _meet(self, connection: MessageConnection, rank: int, peer: Any) -> None:
        """Keep the data of a task; once the last task has sent its data, send the data of all tasks to each of them."""
        with self._lock:
            there = self._peers
            if rank in there:  # from another attempt of the stage; the tasks then meet through Spark alone
                self._meets_here = False
            there[rank] = connection, peer
            self._meeting.append(connection)
            if self._meeting_timer is None and not self._closed:
                self._meeting_timer = threading.Timer(MEETING_TIMEOUT_S, self._stop_meeting)
                self._meeting_timer.daemon = True
                self._meeting_timer.start()
            if self._meets_here and len(there) < self._num_ranks:
                return
            meets_here = self._meets_here
            receivers = [receiver for receiver, _ in there.values()] if meets_here else list(self._meeting)
            peers = [peer for _, (_, peer) in sorted(there.items())]
        for receiver in receivers:
            self._send(receiver, {"kind": "peers", "peers": peers} if meets_here else _MEET_BY_SPARK)

    def _stop_meeting(self) -> None:
        """Make the waiting tasks meet through Spark, unless all tasks have met."""
        with self._lock:
            if len(self._peers) == self._num_ranks or not self._meets_here:
                return
            self._meets_here = False
            receivers = list(self._meeting)
        for receiver in receivers:
            self._send(receiver, _MEET_BY_SPARK)

    def _hand_over(self, message: RankMessage) -> None:
        while self.takes_messages and not self._closed:
            try:
                self._messages.put(message, timeout=1.0)
            except queue.Full:
                self._note_contact(message.rank)
                continue  # the caller's thread is busy; check again whether it has left
            return

    @staticmethod
    def _send(connection: MessageConnection, header: dict[str, Any]) -> None:
        try:
            connection.send(header)
        except OSError:
            pass  # that task is gone already
