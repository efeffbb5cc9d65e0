"""Lines of a rank's output that say what they are: the level of a log record, or a message meant for the driver.

A rank writes marks where whoever started it has set that up, so that they travel in order with all that it prints;
whoever shows the lines takes the marks off again. Nothing is guessed from the text.
"""

from __future__ import annotations

import re

FOR_DRIVER = "driver"
"""Mark of a message that is meant for the driver, whatever else of the output is shown there."""

_SEPARATOR = "\x1e"
"""ASCII's record separator, which no terminal shows and no text holds."""

_MARKED = re.compile(f"{_SEPARATOR}([0-9]+|{FOR_DRIVER}){_SEPARATOR}")


def mark_lines(mark: int | str, text: str) -> str:
    """Return the text with a mark, the level of a record or :data:`FOR_DRIVER`, before each of its lines."""
    return "\n".join(f"{_SEPARATOR}{mark}{_SEPARATOR}{line}" for line in text.splitlines() or [""])


def split_mark(line: str) -> tuple[str | None, str]:
    """Return the mark of a line, None where it has none, and the line without it."""
    found = _MARKED.match(line)
    return (found[1], line[found.end() :]) if found else (None, line)
