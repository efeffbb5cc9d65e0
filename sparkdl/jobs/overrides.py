"""Changes a job by what the command line says: ``epochs=3 model.arguments.hidden=64``. Runs on the *driver*."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import JobFileError
from sparkdl.jobs.suggestions import did_you_mean
from sparkdl.jobs.yaml_tree import Entry, Place, read_tree

IMPORT = "import"
ARGUMENTS = "arguments"

SECTIONS = ("data", "model", "params", "spark", "tracking", "registry", "output", "code")
"""What a job consists of."""

SHORT_FORMS = {"model": IMPORT, "tracking": "mode", "registry": "name"}
"""The key of a section that a plain value in the place of the whole section stands for."""

SOURCES = ("table", "parquet", "sql")
"""Where rows can come from; a job names one."""

_UNDIVIDED = ("spark", "config")
"""Below this path keys have dots of their own."""


@dataclass(frozen=True)
class Override:
    """One argument ``KEY=VALUE``.

    Attributes:
        path: the keys that lead to the value; of a Param alone it begins with ``params``.
        entry: the value.
    """

    path: tuple[str, ...]
    entry: Entry


def read_override(argument: str) -> Override:
    """Understand one argument; a key that is no section is that of a Param.

    Raises:
        JobFileError: if it is none.
    """
    key, equals, text = argument.partition("=")
    place = Place(f"the argument {argument!r}")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise JobFileError(
            f"{place} is not understood. Write KEY=VALUE, as in epochs=3 or data.table=sales.rows."
        )
    if path[: len(_UNDIVIDED)] == _UNDIVIDED:
        rest = ".".join(path[len(_UNDIVIDED) :])
        path = (*_UNDIVIDED, rest) if rest else _UNDIVIDED
    if path[0] not in SECTIONS:
        if len(path) > 1 and path[1] != ARGUMENTS:
            raise JobFileError(f"{place}: a job has no {path[0]!r}. {did_you_mean(path[0], SECTIONS)}")
        path = ("params", *path)
    value = read_tree(text, str(place)).value if text.strip() else None
    return Override(path, Entry(_placed(value, place), place))


def apply_overrides(job: Entry, overrides: Sequence[Override]) -> Entry:
    """Return a job with other values, each later one on those before it.

    A mapping is replaced as a whole by one that is given for its key, and an empty value takes a key away. One source
    of rows replaces another.

    Raises:
        JobFileError: if a key lies below what is no mapping.
    """
    for override in overrides:
        for other in _replaced(override.path):
            job = _with(job, other, Override(other, Entry(None, override.entry.place)))
        job = _with(job, override.path, override)
    return job


def _replaced(path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """What is said no more when one of several sources of rows is."""
    if path[0] != "data" or path[1:] not in {(kind,) for kind in SOURCES}:
        return []
    return [("data", kind) for kind in SOURCES if kind != path[1]]


def _with(entry: Entry, path: tuple[str, ...], override: Override) -> Entry:
    if not path:
        return override.entry
    key, rest = path[0], path[1:]
    value = _as_mapping(entry.value, override, path)
    inner = value.get(key, Entry(None, override.entry.place))
    if key in SHORT_FORMS and len(rest) and not isinstance(inner.value, dict | None):
        inner = Entry({SHORT_FORMS[key]: inner}, inner.place)
    return Entry({**value, key: _with(inner, rest, override)}, entry.place)


def _as_mapping(value: Any, override: Override, path: tuple[str, ...]) -> dict[str, Entry]:
    if isinstance(value, dict):
        return value
    if value is None:
        return {}
    if isinstance(value, str) and path[0] == ARGUMENTS:  # of what is imported by this name
        return {IMPORT: Entry(value, override.entry.place)}
    above = ".".join(override.path[: len(override.path) - len(path)])
    raise JobFileError(f"{override.entry.place}: {above} is {value!r}, which has no {path[0]!r} below it.")


def _placed(value: Any, place: Place) -> Any:
    """Give everything in a value of the command line its one place."""
    if isinstance(value, dict):
        return {key: Entry(_placed(entry.value, place), place) for key, entry in value.items()}
    if isinstance(value, list):
        return [Entry(_placed(entry.value, place), place) for entry in value]
    return value
