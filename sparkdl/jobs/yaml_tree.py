"""Reads YAML with the place of every key and value, and applies the changes that the command line makes to it.

Plain words mean what YAML 1.2 says, not YAML 1.1: ``1e-3`` is a number, and ``off``, ``on``, ``yes``, ``no``,
``12:30`` and ``2026-01-01`` are strings. Tags, and duplicate keys, are errors. A file becomes a tree of
:class:`Entry`. For a mistyped word, :func:`did_you_mean` suggests the most similar one. Changes are written as in
``epochs=3 model.arguments.hidden=64``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from sparkdl.errors import JobFileError


@dataclass(frozen=True)
class Place:
    """Where something was written: a line of a file, or an argument of the command line.

    Attributes:
        source: name of the file, or what stands for the command line.
        line: from 1; None where there are no lines.
    """

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Entry:
    """A value with its place.

    Attributes:
        value: a dict of entries by key, a list of entries, or a plain value: str, int, float, bool, None.
        place: where it was written; that of its key, if it has one.
    """

    value: Any
    place: Place

    def plain(self) -> Any:
        """Return the value without places."""
        if isinstance(self.value, dict):
            return {key: entry.plain() for key, entry in self.value.items()}
        if isinstance(self.value, list):
            return [entry.plain() for entry in self.value]
        return self.value


_NUMBER = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
_PLAIN = (
    (re.compile(r"~|null|Null|NULL|"), lambda _: None),
    (re.compile(r"true|True|TRUE"), lambda _: True),
    (re.compile(r"false|False|FALSE"), lambda _: False),
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(_NUMBER), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)"), lambda text: float(text.replace(".", ""))),
    (re.compile(r"\.(nan|NaN|NAN)"), lambda _: float("nan")),
)
"""What plain words of the core schema of YAML 1.2 (section 10.3.2) stand for; all others are strings."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no type information
    """Leaves it to :func:`_scalar` what a plain word stands for."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as PyYAML declares it


def read_tree(text: str, source: str) -> Entry:
    """Return what a YAML text holds.

    Args:
        text: one document.
        source: name of the file, for messages.

    Raises:
        JobFileError: if it is no YAML, with the line; if it is more than one document.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(source, mark.line + 1 if mark else None)
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise JobFileError(f"{place}: this is no YAML: {what}.") from error
    except yaml.YAMLError as error:  # characters that YAML does not have
        raise JobFileError(f"{source}: this is no YAML: {error}".rstrip(".") + ".") from error
    if node is None:
        raise JobFileError(f"{source}: the file is empty.")
    return _Reading(source).entry(node, _place(node, source))


class _Reading:
    """Makes entries of nodes; what anchors share is made once."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._made: dict[int, Any] = {}
        self._under_way: set[int] = set()

    def entry(self, node: yaml.Node, place: Place) -> Entry:
        key = id(node)
        if key in self._under_way:
            raise JobFileError(f"{place}: an alias stands inside of what it stands for.")
        if key not in self._made:
            self._under_way.add(key)
            self._made[key] = self._value(node)
            self._under_way.discard(key)
        return Entry(self._made[key], place)

    def _value(self, node: yaml.Node) -> Any:
        place = _place(node, self._source)
        if isinstance(node, yaml.MappingNode):
            _check_tag(node, "map", place)
            return self._mapping(node)
        if isinstance(node, yaml.SequenceNode):
            _check_tag(node, "seq", place)
            return [self.entry(each, _place(each, self._source)) for each in node.value]
        _check_tag(node, "str", place)
        return _scalar(node) if node.style is None else node.value

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for key, value in node.value:
            place = _place(key, self._source)
            if not isinstance(key, yaml.ScalarNode):
                raise JobFileError(f"{place}: a key is a word, and this is a list or a mapping.")
            if key.value in entries:
                before = entries[key.value].place.line
                raise JobFileError(f"{place}: the key {key.value!r} stands in line {before} already.")
            entries[key.value] = self.entry(value, place)
        return entries


def _place(node: yaml.Node, source: str) -> Place:
    return Place(source, node.start_mark.line + 1)


def _check_tag(node: yaml.Node, expected: str, place: Place) -> None:
    if node.tag not in (f"tag:yaml.org,2002:{expected}", "!"):
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise JobFileError(f"{place}: the tag {tag} has no meaning in a job file. Leave it out.")


def _scalar(node: yaml.Node) -> Any:
    for pattern, convert in _PLAIN:
        if pattern.fullmatch(node.value):
            return convert(node.value)
    return node.value


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a sentence that names the word that is most like it, or all of them."""
    words = list(known)
    folded = {each.lower(): each for each in words}
    near = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.6)
    return f"Did you mean {folded[near[0]]}?" if near else f"There is: {', '.join(words)}."


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
