"""The two bridges between c10d's ``Store`` and the rendezvous of :mod:`sparkdl.collective`.

Runs on the *rank*. ``RendezvousStore`` lets torch.distributed keep its keys at our coordinator, which
authenticates its clients, so that no ``TCPStore`` listens. ``StoreRendezvous`` opens communicators over a
store that torch already has: that of a process set, or what ``init_process_group("sparkdl", ...)`` was given.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from sparkdl.collective import Deadline
from sparkdl.collective.addresses import hosts_of_name, is_loopback, resolve, route_host
from sparkdl.collective.deadline import to_seconds
from sparkdl.errors import CommunicatorTimeoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.collective import Rendezvous


_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
"""Between two questions whether a key is set: soon at first, as most are, then ever less often."""


class RendezvousStore(Store):
    """A c10d store whose keys lie in a rendezvous. Values are bytes; ``str`` values are encoded as UTF-8.

    C++ keeps only its half of a store: whoever hands one to torch keeps the object too.

    Args:
        rendezvous: where the keys lie.
        timeout_s: how long ``get`` and ``wait`` wait for a key, unless told otherwise.
    """

    def __init__(self, rendezvous: Rendezvous, *, timeout_s: float) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        # Kept in the C++ half, where stores around this one read and change it.
        self.set_timeout(timedelta(seconds=timeout_s))

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key."""
        self._rendezvous.set(key, _encode(value))

    def get(self, key: str) -> bytes:
        """The value of a key, waiting until it is set."""
        return self._rendezvous.get(key, to_seconds(self.timeout))  # type: ignore[attr-defined]  # not in the stub

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which begins at zero, and return its new value."""
        return self._rendezvous.add(key, value)

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        """Set a key if it holds ``expected_value``, or is unset and that is empty; return its value."""
        return self._rendezvous.compare_set(key, _encode(expected_value), _encode(desired_value))

    def delete_key(self, key: str) -> bool:
        """Delete a key; True if there was one."""
        return self._rendezvous.delete(key)

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._rendezvous.num_keys()

    def check(self, keys: list[str]) -> bool:
        """All of the keys are set."""
        return self._rendezvous.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of the keys are set."""
        timeout_s = to_seconds(timeout or self.timeout)  # type: ignore[attr-defined]  # likewise
        for key in keys:
            self._rendezvous.get(key, timeout_s)

    def has_extended_api(self) -> bool:
        """``append``, ``multi_get`` and ``multi_set`` are not offered; torch does without them."""
        return False

    def clone(self) -> RendezvousStore:
        """A store over the same keys that another thread may use: this one, as a rendezvous serves any thread."""
        return self

    # The names by which C++ looks for two of them.
    deleteKey = delete_key  # noqa: N815 - C++ names
    getNumKeys = num_keys  # noqa: N815 - likewise


class StoreRendezvous:
    """A rendezvous whose keys lie in a c10d store, all of them below one prefix."""

    def __init__(self, store: Store, prefix: str = "") -> None:
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._store.set(self._prefix + key, value)  # type: ignore[arg-type]  # bytes are welcome

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value of a key, waiting until it is set.

        Raises:
            CommunicatorTimeoutError: if it is still unset after ``timeout_s``.
        """
        # Asked again and again rather than by the store's own `wait`: a TCPStore serves one caller at a time, and
        # communicators wait on a thread of theirs while others set keys.
        deadline = Deadline(timeout_s)
        pause_s = _FIRST_PAUSE_S
        while not self._store.check([self._prefix + key]):
            if deadline.remaining_s() <= 0:
                raise CommunicatorTimeoutError(
                    f"no rank set {self._prefix + key!r} in the c10d store within {timeout_s:g} s"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return bytes(self._store.get(self._prefix + key))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at zero, and return its new value."""
        return int(self._store.add(self._prefix + key, amount))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a key if it holds ``expected``, or is unset and that is empty; return its value."""
        return bytes(self._store.compare_set(self._prefix + key, expected, desired))  # type: ignore[arg-type]  # likewise

    def delete(self, key: str) -> bool:
        """Delete a key; True if there was one."""
        return bool(self._store.delete_key(self._prefix + key))

    def num_keys(self, prefix: str = "") -> int:
        """Not available: c10d cannot count the keys below a prefix.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("A c10d store cannot count keys below a prefix; ask for keys by name.")

    def hosts_here(self) -> tuple[str, ...]:
        """See :class:`~sparkdl.collective.rendezvous.Located`: known of a ``TCPStore``, whose host all ranks reach."""
        store = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if not isinstance(store, TCPStore):
            return ()
        if found := hosts_of_name(store.host):
            return found
        return tuple(
            host
            for there in resolve(store.host)
            if not is_loopback(there) and (host := route_host(there)) is not None
        )

    def check(self, keys: Sequence[str]) -> bool:
        """All of the keys are set."""
        return bool(self._store.check([self._prefix + key for key in keys]))


def _encode(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
