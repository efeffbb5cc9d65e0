"""The key-value store in which the ranks of a job find each other: its contract, and functions that build on it.

:class:`~sparkdl.rendezvous.client.RendezvousClient` is the usual implementation; any store with these few operations
suffices, and inherits the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from typing import TYPE_CHECKING

from sparkdl.errors import CommunicatorTimeoutError
from sparkdl.rendezvous.deadline import Deadline
from sparkdl.rendezvous.protocol import cut_values, join_values
from sparkdl.topology import name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

_INTERRUPT_S = 0.2
"""How often the interrupts of a view are called while it waits."""

_deadline: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


class Rendezvous(ABC):
    """A store shared by the ranks of a job. Every operation may be called from several threads at once.

    An implementation puts :attr:`_prefix` before each key and the name of each queue.
    """

    _prefix = ""
    _interrupts: tuple[Callable[[], object], ...] = ()

    def view(self, name: str, interrupt: Callable[[], object] | None = None) -> Self:
        """Return a view in which every key begins with ``name/``, so that keys of independent users do not collide.

        Args:
            name: beginning of the keys.
            interrupt: function that is called before :meth:`get`, :meth:`exchange` and :meth:`check` of the view and,
                while they wait, several times a second; an exception that it raises ends them.
        """
        view = copy(self)
        view._prefix = f"{self._prefix}{name}/"
        if interrupt is not None:
            view._interrupts = (*self._interrupts, interrupt)
        return view

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait until the key is set and return its value.

        Raises:
            CommunicatorTimeoutError: if it is not set in time; the message names the key.
        """
        deadline = Deadline(timeout_s)
        while (value := self._wait_for(key, self._time_to_wait_s(deadline))) is None:
            if deadline.expired or not self._interrupts:
                raise CommunicatorTimeoutError(f"no rank set {self._prefix + key!r} within {timeout_s:g} s")
        return value

    def exchange(
        self, key: str, *, rank: int, world_size: int, value: bytes, timeout_s: float
    ) -> list[bytes] | frozenset[int]:
        """Give this rank's value and wait for the values of all ranks.

        Returns the values in order of rank; after the timeout, the set of the ranks that have given their value. A rank
        that was not answered in time may ask again.
        """
        deadline = Deadline(timeout_s)
        while True:
            values = self._exchange(key, rank, world_size, value, self._time_to_wait_s(deadline))
            if isinstance(values, list) or deadline.expired or not self._interrupts:
                return values

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set, without waiting."""
        for interrupt in self._interrupts:
            interrupt()
        return self._are_set(keys)

    def _time_to_wait_s(self, deadline: Deadline) -> float:
        """Time until the next call of the interrupts, or of the whole wait without them; calls them now."""
        for interrupt in self._interrupts:
            interrupt()
        return min(_INTERRUPT_S, deadline.remaining_s()) if self._interrupts else deadline.timeout_s

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Store a value of at most 64 MiB; clients that wait for the key get it."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at zero and return its new value; :meth:`get` returns it as decimal text."""

    @abstractmethod
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store ``desired`` if the key holds ``expected``, or is missing and ``expected`` is empty.

        Returns the value that the key holds afterwards; ``expected`` if the key is missing.
        """

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Remove a key; return whether it was there."""

    def num_keys(self) -> int:
        """Count the keys of this view.

        Raises:
            NotImplementedError: if the store cannot count the keys below a prefix, as those of c10d.
        """
        raise NotImplementedError("This store cannot count keys below a prefix; ask for keys by name.")

    @abstractmethod
    def _wait_for(self, key: str, timeout_s: float) -> bytes | None:
        """Wait until the key is set and return its value; None if it is not set in time."""

    @abstractmethod
    def _are_set(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set, without waiting."""

    def post(self, queue: str, value: bytes) -> int:
        """Set the next numbered key of a queue, ``queue/1`` being the first, and return its number.

        Without an operation of its own for this, a store gets two requests: a client that ends in between leaves a
        number without a value, for which readers of the queue wait.
        """
        number = self.add(f"{queue}/count", 1)
        self.set(f"{queue}/{number}", value)
        return number

    def post_if_lost(self, queue: str, value: bytes) -> None:  # noqa: B027 - by default without effect
        """Have ``value`` posted to a queue (see :meth:`post`) if this process ends without a goodbye.

        A second call replaces the value of the first; an empty value cancels it. Without effect if the store does not
        notice losses.
        """

    def _exchange(
        self, key: str, rank: int, world_size: int, value: bytes, timeout_s: float
    ) -> list[bytes] | frozenset[int]:
        """As :meth:`exchange`, without interrupts."""
        deadline = Deadline(timeout_s)
        rank_keys = [f"{key}/{other}" for other in range(world_size)]
        self.set(rank_keys[rank], value)
        try:
            if rank == 0:
                values = [self.get(rank_key, deadline.remaining_s()) for rank_key in rank_keys]
                self.set(f"{key}/all", join_values(values))
            else:
                values = cut_values(self.get(f"{key}/all", deadline.remaining_s()))
        except CommunicatorTimeoutError:
            return frozenset(other for other in range(world_size) if self.check([rank_keys[other]]))
        if self.add(f"{key}/readers", 1) == world_size:
            for used_key in [*rank_keys, f"{key}/all", f"{key}/readers"]:
                self.delete(used_key)
        return values

    def hosts_here(self) -> tuple[str, ...]:
        """The addresses of this machine that ranks on other machines are known, or likely, to reach.

        Empty if the store does not know how this machine and its own machine reach each other.
        """
        return ()


@contextmanager
def answered_by(deadline: Deadline) -> Iterator[None]:
    """Limit the requests of this thread to a rendezvous to the deadline, within this context."""
    token = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(token)


def time_for_answers_s(longest_s: float) -> float:
    """The timeout of a request of this thread: ``longest_s``, or less within :func:`answered_by`."""
    deadline = _deadline.get()
    return longest_s if deadline is None else min(longest_s, deadline.remaining_s())


def all_gather_bytes(
    rendezvous: Rendezvous, *, key: str, rank: int, world_size: int, value: bytes, timeout_s: float
) -> list[bytes]:
    """Exchange one value per rank; every rank gets all of them in order of rank.

    The number of requests to the store grows with the world size, not with its square, and the store keeps nothing
    afterwards. Use each ``key`` once.

    Raises:
        CommunicatorTimeoutError: if some rank does not take part in time; the message names it.
    """
    if world_size == 1:
        return [value]
    values = rendezvous.exchange(key, rank=rank, world_size=world_size, value=value, timeout_s=timeout_s)
    if isinstance(values, list):
        return values
    missing = [other for other in range(world_size) if other not in values]
    whom = f"{name_ranks(missing)} of {world_size} to take part" if missing else "rank 0 to answer"
    raise CommunicatorTimeoutError(
        f"{key!r} was not complete within {timeout_s:g} s: it waited for {whom}."
        " Look at why that did not start, or allow more time."
    )
