"""Runs an iterator in a background thread, a bounded number of items ahead of who takes them.

Runs on every *rank*: shuffling goes on while the training loop computes. Items are handed over as they are, so they
should be worth a change of threads: thousands of rows, not a batch of a few.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from sparkdl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

Item = TypeVar("Item")


class ReadAhead(Generic[Item]):
    """An iterator over the items of another one, which a thread of its own goes through.

    Args:
        items: what to go through; the thread closes it in the end.
        max_items: how many items wait at most.
        name: name of the thread.
        max_bytes: what the items that wait and the one that is being made take at most, where items are no larger
            than those before them. One is always made, whatever it takes.
        bytes_of: what an item takes; without it items take nothing.
    """

    def __init__(
        self,
        items: Generator[Item, None, None],
        max_items: int,
        name: str,
        *,
        max_bytes: int = 0,
        bytes_of: Callable[[Item], int] | None = None,
    ) -> None:
        self._items = items
        self._max_items = max_items
        self._max_bytes, self._bytes_of = max_bytes, bytes_of
        self._waiting_bytes = self._largest_bytes = 0
        self._waiting: deque[Item] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        """Return the next item; an error of the iterator is raised where its item would have been."""
        with self._changed:
            while not self._waiting and not self._ended:
                self._changed.wait()
            if self._waiting:
                item = self._waiting.popleft()
                self._waiting_bytes -= self._size_of(item)
                self._changed.notify()
                return item
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """Ask the thread to end after the item that it is making, and wait for it.

        Whatever the items wait for must end before: close the reader first. Items that wait can still be taken; those
        that were not made are a :class:`~sparkdl.errors.DataError`.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _size_of(self, item: Item) -> int:
        return 0 if self._bytes_of is None else self._bytes_of(item)

    def _wait_while(self, is_full: Callable[[], bool]) -> None:
        while is_full() and not self._closed:
            self._changed.wait()
        if self._closed:
            # Not an end, which would pass for that of the items.
            raise DataError("The feed was closed while an epoch was being read.")

    def _run(self) -> None:
        try:
            for item in self._items:
                size = self._size_of(item)
                self._largest_bytes = max(self._largest_bytes, size)
                with self._changed:
                    self._wait_while(lambda: len(self._waiting) >= self._max_items)
                    self._waiting.append(item)
                    self._waiting_bytes += size
                    del item
                    self._changed.notify()
                    # Before the next one is made, which will take memory from then on.
                    self._wait_while(
                        lambda: (
                            bool(self._waiting)
                            and self._waiting_bytes + self._largest_bytes > self._max_bytes
                            and self._bytes_of is not None
                        )
                    )
        except BaseException as error:  # raised where the items are taken
            self._error = error
        finally:
            self._items.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()
