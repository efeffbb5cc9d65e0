"""What sparkdl's collectives log on a rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged_warnings() -> Iterator[list[str]]:
    """The warnings that any thread logs inside the block; the list grows as they are logged."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sparkdl.collective")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
