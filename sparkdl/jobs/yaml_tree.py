"""Reads YAML with the place of every key and value, and without the surprises of YAML 1.1. Runs on the *driver*.

Plain words mean what YAML 1.2 says: ``1e-3`` is a number, and ``off``, ``on``, ``yes``, ``no``, ``12:30`` and
``2026-01-01`` are strings. Tags, and keys that come twice, are errors. A file becomes a tree of :class:`Entry`.
"""

from __future__ import annotations

import re
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
