"""The connections between the barrier tasks and the driver, at both ends.

:class:`DriverLink` is the end of a barrier task. It sends log lines, events and failures, and receives what the other
tasks report and the order to stop. On Spark Connect the executors may not reach the driver's machine. Lines are then
kept and travel with the result.

:class:`DriverChannel` is the end of the driver. It receives log lines, events and failures, introduces the tasks to
each other, and cancels. It accepts only tasks that prove the job's secret. Messages are handed to the caller's own
thread, in order per rank; when that thread is slow the tasks wait, so that nothing is dropped and no backlog builds
up.
"""

from __future__ import annotations

import logging
import queue
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from sparkdl.launch.preflight import is_connect
from sparkdl.launch.wire.messages import MessageConnection
from sparkdl.launch.wire.outcome import Failure, OnStop, RankSigns, StopReason
from sparkdl.rendezvous.addresses import (
    LISTEN,
    LOOPBACK,
    Address,
    hosts_of_name,
    is_local,
    reachable_hosts,
    resolve,
    route_host,
)
from sparkdl.rendezvous.dialing import connect_authenticated
from sparkdl.rendezvous.listener import AuthenticatedListener

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


PURPOSE = b"sparkdl driver"
REACH_TIMEOUT_S = 10.0
SPOOL_BYTES = 8 << 20

OnPeers = Callable[[list[dict[str, Any]] | None], None]


class DriverLink:
    """Sends to the driver what concerns one rank; a context manager."""

    def __init__(self, address: Address, secret: bytes, *, rank: int, host: str) -> None:
        self.unsent: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115 - closed below
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
            return self  # out of reach, or another machine has that address here: the lines are kept
        self._connection = MessageConnection(sock)
        self._send(self._hello)
        threading.Thread(
            target=self._listen, args=(self._connection,), name="sparkdl-driver-watch", daemon=True
        ).start()
        # What was cancelled before this task came is known from here on, and so never begins.
        self._is_answered.wait(REACH_TIMEOUT_S)
        return self

    def meet(self, mine: dict[str, Any], on_peers: OnPeers) -> None:
        """Tell the other tasks something by the driver.

        Args:
            mine: what JSON can hold.
            on_peers: gets what all told, by rank, from a thread; or None where the driver is out of reach of any task,
                so that all have to tell each other by Spark. Where it is out of reach of this one, that is at once.
        """
        with self._lock:
            self._on_peers = on_peers
        if self._connection is None:
            on_peers(None)
        else:
            self._send({"kind": "meet", "peer": mine})

    def watch(self, on_stop: OnStop) -> None:
        """Call ``on_stop`` with the reason when the driver cancels or is gone; from a thread, or at once if it has.

        It takes the place of one that was given before.
        """
        with self._lock:
            self._on_stop, reason = on_stop, self._stop_reason
        if reason is not None:
            on_stop(reason)

    def line(self, text: str) -> None:
        """Pass on one line that the rank printed."""
        if not self._send({"kind": "log"}, text.encode()):
            self.unsent.write(text.encode() + b"\n")

    def event(self, event: dict[str, Any]) -> None:
        """Pass on an event that the rank reported; lost when the driver is out of reach."""
        self._send({"kind": "event", "event": event})

    def started(self) -> None:
        """Say that the rank process runs."""
        self._send({"kind": "started"})

    def beat(self, number: int, signs: RankSigns) -> bool:
        """Tell that this task lives, and how its rank does; False if the driver is out of reach."""
        return self._send({"kind": "signs", "number": number, "signs": signs.to_fields()})

    def failure(self, failure: Failure) -> None:
        """Tell of a failure at once, in case this task does not live to yield it."""
        self._send({"kind": "failure", "failure": failure.to_fields()})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        while (message := connection.receive()) is not None:
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


logger = logging.getLogger(__name__)

MAX_WAITING_MESSAGES = 10_000
MEETING_PATIENCE_S = REACH_TIMEOUT_S + 5.0
"""How long to wait for the other tasks once one has come: more than they take to find the driver out of reach."""


@dataclass(frozen=True, kw_only=True)
class RankMessage:
    """One thing that a rank said."""

    rank: int
    line: str | None = None
    event: dict[str, Any] | None = None


@dataclass
class _Heard:
    """What has become known of the ranks; guarded by the channel's lock."""

    started: set[int] = field(default_factory=set)
    hosts: dict[int, str] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    signs: dict[int, tuple[float, int, RankSigns]] = field(default_factory=dict)
    """When each rank's task was last heard of, the number of the signs that it told, and these."""
    peers: dict[int, tuple[MessageConnection, Any]] = field(default_factory=dict)
    """What tasks tell each other, by rank."""
    introduces: bool = True
    """Whether tasks may be introduced to each other: none has gone, none has come in another one's place, and none is
    long overdue, as where it cannot reach the driver. Else they meet by Spark, all of them."""
    meeting: list[MessageConnection] = field(default_factory=list)
    """Of all tasks that want to meet, also those of earlier attempts of the stage."""


@dataclass
class _Task:
    """What one connection has told of itself."""

    rank: int = -1
    said_goodbye: bool = False


_MEET_BY_SPARK = {"kind": "meet by spark"}
_WELCOME = {"kind": "welcome"}
"""What a task hears first, unless it is to stop."""


def _stop_message(reason: StopReason) -> dict[str, Any]:
    return {"kind": "stop", "reason": str(reason), "is_hang": reason.is_hang}


class DriverChannel:
    """Listens for the tasks of one job; a context manager.

    Args:
        secret: of the job.
        num_ranks: how many tasks are to meet.
        host: address or addresses to bind, as :func:`driver_hosts` finds them; what
            :func:`~sparkdl.rendezvous.addresses.reachable_hosts` chooses when None.
    """

    def __init__(self, secret: bytes, num_ranks: int, *, host: str | Sequence[str] | None = None) -> None:
        self._num_ranks = num_ranks
        self._messages: queue.Queue[RankMessage] = queue.Queue(MAX_WAITING_MESSAGES)
        self._lock = threading.Condition()
        self._heard = _Heard()
        self._connections: set[MessageConnection] = set()
        self._cancelled: StopReason | None = None
        self._closed = False
        self._is_heard = True
        self._patience: threading.Timer | None = None
        self._listener = AuthenticatedListener(
            secret, purpose=PURPOSE, host=host, on_connection=self._serve_in_thread
        )
        self.address = self._listener.address

    @property
    def started(self) -> set[int]:
        """Ranks whose process has been started."""
        with self._lock:
            return set(self._heard.started)

    @property
    def failures(self) -> list[Failure]:
        """Failures in the order in which they were heard of; a task that fell silent is one."""
        with self._lock:
            silent = [
                Failure(
                    rank=rank,
                    host=self._heard.hosts[rank],
                    error="its executor or Python worker was lost",
                    is_loss=True,
                    traceback="",
                )
                for rank in self._heard.lost
            ]
            return self._heard.failures + silent

    @property
    def hosts(self) -> dict[int, str]:
        """The hosts of the ranks whose tasks were heard of."""
        with self._lock:
            return dict(self._heard.hosts)

    @property
    def signs(self) -> dict[int, tuple[float, int, RankSigns]]:
        """When each rank's task was last heard of, the number of the signs of its rank that it told, and these."""
        with self._lock:
            return dict(self._heard.signs)

    def next_message(self, timeout_s: float) -> RankMessage | None:
        """Wait for what a rank says next; None if nothing comes in time."""
        try:
            return self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def wait_until_silent(self, timeout_s: float) -> None:
        """Wait until every task has closed its connection, so that its last line has been heard."""
        with self._lock:
            self._lock.wait_for(lambda: not self._connections or self._messages.full(), timeout_s)

    def cancel(self, reason: StopReason) -> None:
        """Have every task end its rank, those that connect from now on too."""
        with self._lock:
            self._cancelled = reason
            connections = list(self._connections)
        for connection in connections:
            self._send(connection, _stop_message(reason))

    def ignore_messages(self) -> None:
        """Drop what ranks say from now on, as nobody takes it any more: their tasks would wait for that."""
        self._is_heard = False

    def __enter__(self) -> DriverChannel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        with self._lock:
            if self._patience is not None:
                self._patience.cancel()
            # In one breath: a task that has just proved itself is either among these, or is turned away.
            self._closed = True
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    def _serve_in_thread(self, sock: socket.socket) -> None:
        connection = MessageConnection(sock)
        with self._lock:
            is_late = self._closed
            if not is_late:
                self._connections.add(connection)
            cancelled = self._cancelled
        if is_late:
            connection.close()
            return
        self._send(connection, _WELCOME if cancelled is None else _stop_message(cancelled))
        threading.Thread(target=self._serve, args=(connection,), name="sparkdl-driver", daemon=True).start()

    def _serve(self, connection: MessageConnection) -> None:
        task = _Task()
        try:
            self._listen(connection, task)
        finally:
            with self._lock:
                if task.rank >= 0 and not task.said_goodbye:
                    self._heard.lost.append(task.rank)
                if task.rank in self._heard.peers:
                    self._heard.introduces = False
                self._heard.signs.pop(task.rank, None)
                self._connections.discard(connection)
                self._lock.notify_all()
            connection.close()

    def _listen(self, connection: MessageConnection, task: _Task) -> None:
        while not task.said_goodbye and (message := connection.receive()) is not None:
            header, body = message
            kind = header["kind"]
            self._note_sign(task.rank)
            if kind == "log":
                self._hand_over(RankMessage(rank=task.rank, line=str(body, "utf-8", "replace")))
            elif kind == "event":
                self._hand_over(RankMessage(rank=task.rank, event=header["event"]))
            elif kind == "meet":
                self._introduce(connection, task.rank, header["peer"])
            elif kind == "goodbye":
                task.said_goodbye = True
            else:
                with self._lock:
                    if kind == "hello":
                        task.rank = int(header["rank"])
                        self._heard.hosts[task.rank] = header["host"]
                        self._heard.signs[task.rank] = time.monotonic(), 0, RankSigns()
                    elif kind == "started":
                        self._heard.started.add(task.rank)
                    elif kind == "failure":
                        self._heard.failures.append(Failure.from_fields(header["failure"]))
                    elif kind == "signs":
                        signs = RankSigns.from_fields(header["signs"])
                        self._heard.signs[task.rank] = time.monotonic(), header["number"], signs

    def _note_sign(self, rank: int) -> None:
        """A task that says anything, or would if it were not kept waiting, lives."""
        with self._lock:
            if rank in self._heard.signs:
                self._heard.signs[rank] = time.monotonic(), *self._heard.signs[rank][1:]

    def _introduce(self, connection: MessageConnection, rank: int, peer: Any) -> None:
        """Note what a task tells the others; the last one has all of them hear it."""
        with self._lock:
            there = self._heard.peers
            if rank in there:  # of another attempt of the stage, whose tasks find each other by Spark alone
                self._heard.introduces = False
            there[rank] = connection, peer
            self._heard.meeting.append(connection)
            if self._patience is None and not self._closed:
                self._patience = threading.Timer(MEETING_PATIENCE_S, self._stop_introducing)
                self._patience.daemon = True
                self._patience.start()
            if self._heard.introduces and len(there) < self._num_ranks:
                return
            introduces = self._heard.introduces
            receivers = [each for each, _ in there.values()] if introduces else list(self._heard.meeting)
            told = [peer for _, (_, peer) in sorted(there.items())]
        for receiver in receivers:
            self._send(receiver, {"kind": "peers", "peers": told} if introduces else _MEET_BY_SPARK)

    def _stop_introducing(self) -> None:
        """Have the tasks that wait meet by Spark, unless all have met."""
        with self._lock:
            if len(self._heard.peers) == self._num_ranks or not self._heard.introduces:
                return
            self._heard.introduces = False
            receivers = list(self._heard.meeting)
        for receiver in receivers:
            self._send(receiver, _MEET_BY_SPARK)

    def _hand_over(self, message: RankMessage) -> None:
        while self._is_heard and not self._closed:
            try:
                self._messages.put(message, timeout=1.0)
            except queue.Full:
                self._note_sign(message.rank)
                continue  # the caller's thread is busy; look whether it has left
            return

    @staticmethod
    def _send(connection: MessageConnection, header: dict[str, Any]) -> None:
        try:
            connection.send(header)
        except OSError:
            pass  # that task is gone already


def driver_hosts(spark: SparkSession) -> Sequence[str]:
    """The addresses of this machine at which the tasks of a session are to reach this process.

    Loopback where Spark runs on this machine alone; else the address that Spark's own driver listens on, or, for a
    client of Spark Connect, the one by which it reaches the server.
    """
    master, driver = _setting(spark, "spark.master"), _setting(spark, "spark.driver.host")
    if is_connect(spark):
        server = resolve(_server_host(spark))
        if not any(map(is_local, server)):
            return reachable_hosts(host for there in server if (host := route_host(there)) is not None)
        # What goes by a tunnel ends elsewhere.
        is_spark_here = any(map(is_local, resolve(driver)))
    else:
        is_spark_here = True
    if is_spark_here and re.match(r"local(-cluster)?(\[|$)", master):
        return [LOOPBACK]
    found = hosts_of_name(driver) or hosts_of_name(_setting(spark, "spark.driver.bindAddress"))
    hosts = reachable_hosts(found)
    if not found:
        _note_once(
            f"spark.driver.host={driver!r} is no address of this machine, so tasks are listened for on"
            f" {', '.join(hosts)}. If the executors cannot reach that, say where they can in {LISTEN}."
        )
    return hosts


def _setting(spark: SparkSession, name: str) -> str:
    if not is_connect(spark):
        return str(spark.sparkContext.getConf().get(name, ""))
    from pyspark.errors import PySparkException

    try:
        return spark.conf.get(name, "") or ""
    except PySparkException:  # managed servers keep some settings to themselves
        return ""


def _server_host(spark: SparkSession) -> str:
    from pyspark.errors import PySparkException

    try:
        return str(spark.client.host)
    except PySparkException:  # a channel that a service's own client has made has none
        return ""


@cache
def _note_once(text: str) -> None:
    logger.warning("%s", text)
