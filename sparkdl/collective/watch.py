"""A thread that polls while there is work, and otherwise sleeps until it is woken."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class Watch:
    """A thread that sleeps until :meth:`wake`, and then looks every ``pause_s`` seconds until there is no work left.

    Args:
        look: called on the thread; returns whether it has to look again without being woken.
        name: name of the thread.
        pause_s: time between two looks, in seconds, however often the thread is woken.
    """

    def __init__(self, look: Callable[[], bool], *, name: str, pause_s: float) -> None:
        self._look, self._pause_s = look, pause_s
        self._has_news, self._is_closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look; costs little if it is awake."""
        if not self._has_news.is_set():
            self._has_news.set()

    def close(self) -> None:
        """End the thread, and wait for a look that has begun. May be called again."""
        self._is_closed.set()
        self._has_news.set()
        self._thread.join()

    def _run(self) -> None:
        # ``close`` may come before any line. What it sets first ends the loop, even where what it sets last is cleared.
        while not self._is_closed.wait(self._pause_s):
            self._has_news.wait()
            self._has_news.clear()
            if not self._is_closed.is_set() and self._has_work():
                self._has_news.set()

    def _has_work(self) -> bool:
        try:
            return self._look()
        except Exception:  # the next one who wakes the thread needs it too
            logger.exception("A look of the thread %s failed.", self._thread.name)
            return False
