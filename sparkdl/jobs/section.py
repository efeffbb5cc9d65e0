"""Takes values out of a section of a job file, with errors that name line and key. Runs on the *driver*."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sparkdl.errors import JobFileError
from sparkdl.jobs.suggestions import did_you_mean
from sparkdl.jobs.yaml_tree import Entry, Place

T = TypeVar("T")


class Section:
    """A mapping of a job file; what is no mapping, or has keys that it does not know, is an error.

    Args:
        entry: the mapping; None for one that is not there.
        path: its key, with those above it.
        known: the keys that it may have; None for any.
        place: of the mapping, where it is not there.

    Raises:
        JobFileError: naming file, line and key.
    """

    def __init__(self, entry: Entry | None, path: str, known: Sequence[str] | None, place: Place) -> None:
        self.path = path
        self.place = entry.place if entry is not None else place
        value = entry.value if entry is not None else None
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(f"takes a mapping of keys to values, got {describe(value)}.")
        self._entries: dict[str, Entry] = {key: each for key, each in value.items() if each.value is not None}
        for key, each in value.items():
            if known is not None and key not in known:
                where = self.path or "a job"
                raise JobFileError(f"{each.place}: {where} has no key {key!r}. {did_you_mean(key, known)}")

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def entries(self) -> dict[str, Entry]:
        """Return what is there by key."""
        return dict(self._entries)

    def get(self, key: str) -> Entry | None:
        """Return what a key stands for; None where it is not there, or null."""
        return self._entries.get(key)

    def string(self, key: str) -> str | None:
        """Return a text; None where it is not there."""
        found: str | None = self._typed(
            key, lambda value: isinstance(value, str) and bool(value.strip()), "a text"
        )
        return found

    def strings(self, key: str) -> tuple[str, ...]:
        """Return a list of texts, of which a single one may stand alone; none where it is not there."""

        def fits(value: Any) -> bool:
            return isinstance(value, str | list) and all(
                isinstance(each, str) and each.strip()
                for each in ([value] if isinstance(value, str) else value)
            )

        found: Any = self._typed(key, fits, "a text or a list of texts")
        if found is None:
            return ()
        return (found,) if isinstance(found, str) else tuple(found)

    def error(self, message: str, key: str | None = None) -> JobFileError:
        """Return an error about the section, or one of its keys."""
        entry = self._entries.get(key) if key is not None else None
        place = entry.place if entry is not None else self.place
        name = ".".join(part for part in (self.path, key) if part)
        return JobFileError(f"{place}: {name}: {message}" if name else f"{place}: {message}")

    def _typed(self, key: str, fits: Callable[[Any], bool], takes: str) -> Any:
        entry = self._entries.get(key)
        if entry is None:
            return None
        value = entry.plain()
        if not fits(value):
            raise self.error(f"takes {takes}, got {describe(value)}.", key)
        return value


def describe(value: Any) -> str:
    """Return what somebody wrote, in few words."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    return "an empty text" if value == "" else repr(value)
