"""A thread that sends messages in order, so that nobody who has something to say waits for the server. On the *driver*.

What it cannot send it tries again, until it is closed: then it gives back what was not sent. A call that hangs is left
to itself, in a thread that does not keep Python from ending.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from sparkdl.tracking.messages import joined
from sparkdl.tracking.tracking_uri import without_credentials

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkdl.tracking.messages import Message

MAX_WAITING = 10_000
"""Messages that wait at most; at four a second, that is more than half an hour."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class RefusedError(Exception):
    """The server will not take a message, however often it is sent; its ``__cause__`` says why."""


class Sender:
    """Sends messages by a function, one after the other.

    Args:
        send: sends one. It raises :class:`RefusedError` for one that is never taken, which is then left out with a
            warning, and anything else for one that is to be tried again.
        spill: takes messages that are more than may wait; called on the thread of :meth:`put`.
        warn: takes warnings, as a logger does.
        name: of what is told, for warnings.
    """

    def __init__(
        self,
        send: Callable[[Message], None],
        *,
        spill: Callable[[list[Message]], None],
        warn: Callable[..., None],
        name: str,
    ) -> None:
        self._send, self._spill, self._warn, self._name = send, spill, warn, name
        self._waiting: deque[Message] = deque()
        self._in_flight: Message | None = None
        self._changed = threading.Condition()
        self._num_hurries = self._num_failures = 0
        self._is_closed = self._is_warned = False
        self.last_error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="sparkdl-mlflow", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        """Have a message sent; returns at once."""
        with self._changed:
            last = joined(self._waiting[-1], message) if self._waiting else None
            if last is not None:
                self._waiting[-1] = last
            else:
                self._waiting.append(message)
            spilled = []
            if len(self._waiting) > MAX_WAITING:
                spilled = [self._waiting.popleft() for _ in range(MAX_WAITING // 2)]
            self._changed.notify_all()
        if spilled:
            self._spill(spilled)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all is sent, for so long; return whether it is.

        What failed before is tried again at once; when that fails too, there is nothing to wait for.
        """
        with self._changed:
            # What is being sent now may have begun when things were worse.
            enough = self._num_failures + (1 if self._in_flight is None else 2)
            self._num_hurries += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_done or self._num_failures >= enough, timeout_s)
            return self._is_done

    @property
    def _is_done(self) -> bool:
        return not self._waiting and self._in_flight is None

    def close(self) -> list[Message]:
        """Send nothing more, and return what was not sent, what is being sent among it."""
        with self._changed:
            self._is_closed = True
            left = [*([self._in_flight] if self._in_flight is not None else []), *self._waiting]
            self._waiting.clear()
            self._changed.notify_all()
        return left

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while (message := self._next()) is not None:
            try:
                self._send(message)
            except RefusedError as error:
                if self._is_closed:  # it was kept, and what it sends from may be gone by now
                    return
                why = without_credentials(str(error.__cause__))
                self._warn("MLflow does not take %s of %s: %s", message.kind, self._name, why)
            except Exception as error:
                if self._is_closed:  # likewise
                    return
                self._note(error)
                with self._changed:
                    self._waiting.appendleft(message)
                    self._in_flight = None
                    self._num_failures += 1
                    self._changed.notify_all()
                    self._pause(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s = _FIRST_PAUSE_S
            with self._changed:
                self._in_flight = None
                self._changed.notify_all()

    def _next(self) -> Message | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if self._is_closed:
                return None
            self._in_flight = self._waiting.popleft()
            return self._in_flight

    def _pause(self, pause_s: float) -> None:
        """Wait until it is time to try again; with the lock."""
        before = self._num_hurries
        self._changed.wait_for(lambda: self._is_closed or self._num_hurries > before, pause_s)

    def _note(self, error: Exception) -> None:
        self.last_error = error
        if not self._is_warned:
            self._is_warned = True
            self._warn(
                "MLflow cannot be told of %s: %s: %s. The fit goes on; what could not be sent is tried again.",
                self._name,
                type(error).__name__,
                _first_line(error),
            )


def _first_line(error: Exception) -> str:
    return (without_credentials(str(error)).splitlines() or [""])[0][:300]
