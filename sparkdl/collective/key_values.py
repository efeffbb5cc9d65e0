"""The coordinator's memory: keys, values, and who waits for which key. No sockets and no threads in here."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sparkdl.collective.coordinator_protocol import MAX_VALUE_BYTES, join_values

Answer = Callable[[bytes | None], None]
"""Called once with the value of the key that was waited for, or with None when the wait has run out."""


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    unanswered: set[int]
    values: dict[int, bytes] = field(default_factory=dict)


class KeyValues:
    """Keys with their values, as a c10d store has them: counters are decimal text."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._exchanges: dict[str, _Exchange] = {}
        self._waits: dict[str, dict[int, Answer]] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._wait_numbers = itertools.count()

    def set(self, key: str, value: bytes) -> None:
        """Store a value and answer everyone who waits for it.

        Raises:
            ValueError: if the value is larger than 64 MiB.
        """
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"value of {key!r} has {len(value)} bytes; at most {MAX_VALUE_BYTES} are kept")
        self._values[key] = value
        for answer in self._waits.pop(key, {}).values():
            answer(value)

    def wait(self, key: str, timeout_s: float, answer: Answer) -> Callable[[], None]:
        """Have ``answer`` called once the key is set, or now if it is; what is returned ends the wait."""
        if key in self._values:
            answer(self._values[key])
            return lambda: None
        return self._add_wait(key, timeout_s, answer)

    def exchange(
        self, key: str, rank: int, world_size: int, value: bytes, timeout_s: float, answer: Answer
    ) -> Callable[[], None]:
        """Have ``answer`` called with the joined values of all ranks once the last of them has given its own.

        What is returned ends the wait, but does not take the value back; the rank may ask again. The exchange is
        forgotten when all ranks have been answered.
        """
        exchange = self._exchanges.setdefault(key, _Exchange(unanswered=set(range(world_size))))
        exchange.values[rank] = value

        def deliver(joined: bytes | None) -> None:
            if joined is not None:
                exchange.unanswered.discard(rank)
            answer(joined)

        end_wait = self._add_wait(_exchange_key(key), timeout_s, deliver)
        if len(exchange.values) == world_size:
            joined = join_values([exchange.values[other] for other in sorted(exchange.values)])
            for waiting in self._waits.pop(_exchange_key(key)).values():
                waiting(joined)
            if not exchange.unanswered:
                del self._exchanges[key]
        return end_wait

    def ranks_in(self, key: str) -> list[int]:
        """The ranks that have given their value to an exchange that is under way."""
        return sorted(self._exchanges[key].values) if key in self._exchanges else []

    def _add_wait(self, key: str, timeout_s: float, answer: Answer) -> Callable[[], None]:
        number = next(self._wait_numbers)
        self._waits.setdefault(key, {})[number] = answer
        heapq.heappush(self._deadlines, (time.monotonic() + timeout_s, number, key))

        def end_wait() -> None:
            self._forget(number, key)

        return end_wait

    def expire(self) -> float | None:
        """Answer the waits that have run out; return the seconds until the next does, None without any."""
        while self._deadlines:
            end, number, key = self._deadlines[0]
            waiting = number in self._waits.get(key, {})
            remaining_s = end - time.monotonic()
            if waiting and remaining_s > 0:
                return remaining_s
            heapq.heappop(self._deadlines)
            if waiting and (answer := self._forget(number, key)) is not None:
                answer(None)
        return None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at zero and return its new value.

        Raises:
            ValueError: if the key holds something else than a number.
        """
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total).encode())
        return total

    def post(self, queue: str, value: bytes) -> int:
        """Set the next numbered key of a queue, ``queue/1`` being the first, and return its number."""
        number = self.add(f"{queue}/count", 1)
        self.set(f"{queue}/{number}", value)
        return number

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store ``desired`` if the key holds ``expected``, or is missing and that is empty.

        Returns what the key holds now; ``expected`` if it is missing.
        """
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self.set(key, desired)
            return desired
        return expected if current is None else current

    def delete(self, key: str) -> bool:
        """Remove a key; say whether it was there."""
        return self._values.pop(key, None) is not None

    def check(self, keys: list[str]) -> bool:
        """Say whether all keys are set."""
        return all(key in self._values for key in keys)

    def num_keys(self, prefix: str) -> int:
        """Count the keys that begin with ``prefix``."""
        return sum(key.startswith(prefix) for key in self._values)

    def _forget(self, number: int, key: str) -> Answer | None:
        waits = self._waits.get(key, {})
        answer = waits.pop(number, None)
        if not waits:
            self._waits.pop(key, None)
        return answer


def _exchange_key(key: str) -> str:
    # Nobody sets such a key.
    return f"{key}\0"
