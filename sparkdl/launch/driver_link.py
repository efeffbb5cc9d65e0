"""A barrier task's connection to the driver.

Log lines, events and failures go out; what the other tasks tell and the order to stop come in. On Spark Connect the
driver's machine may be out of the executors' reach. Lines are then kept and travel with the result.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any

from sparkdl.launch.messages import MessageConnection
from sparkdl.launch.outcome import Failure, OnStop, StopReason
from sparkdl.launch.rank_signs import RankSigns
from sparkdl.rendezvous.addresses import Address
from sparkdl.rendezvous.dialing import connect_authenticated

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
