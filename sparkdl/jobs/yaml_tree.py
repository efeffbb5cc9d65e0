"""Reads YAML with the position of every key and value, and applies overrides of the command line.

Scalars are those of YAML 1.2, not YAML 1.1: ``1e-3`` is a number, and ``off``, ``on``, ``yes``, ``no`` and ``12:30``
are strings. Tags and duplicate keys are errors. A file becomes a tree of :class:`JobEntry`. For a mistyped word,
:func:`suggestion` names the most similar one. Overrides are written as ``epochs=3 model.arguments.hidden=64``.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode
from ruamel.yaml.resolver import BaseResolver
from ruamel.yaml.tag import Tag

from sparkdl.errors import JobFileError, did_you_mean


@dataclass(frozen=True)
class JobEntry:
    """A value with its position.

    Attributes:
        value: dict of entries by key, list of entries, or plain value: str, int, float, bool, None.
        position: ``file:line`` of the key, if the value has one, else of the value itself; or the quoted argument of
            the command line.
    """

    value: Any
    position: str

    def plain(self) -> Any:
        """Return the value without positions."""
        if isinstance(self.value, dict):
            return {key: entry.plain() for key, entry in self.value.items()}
        if isinstance(self.value, list):
            return [entry.plain() for entry in self.value]
        return self.value


class _ResolvedTag(Tag):
    """The tag of a node to which the text gives none."""


class _CoreSchema(BaseResolver):
    """Gives plain scalars their types by YAML 1.2's core schema (section 10.3.2)."""

    SCALARS: ClassVar[dict[str, tuple[re.Pattern[str], Callable[[str], Any]]]] = {
        "null": (re.compile(r"null|Null|NULL|~|"), lambda _: None),
        "bool": (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda word: word.lower() == "true"),
        "int": (re.compile(r"[-+]?[0-9]+"), int),
        "octal": (re.compile(r"0o[0-7]+"), lambda word: int(word[2:], 8)),
        "hexadecimal": (re.compile(r"0x[0-9a-fA-F]+"), lambda word: int(word[2:], 16)),
        "float": (re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"), float),
        "infinity": (re.compile(r"[-+]?\.(?:inf|Inf|INF)"), lambda word: float(word.replace(".", ""))),
        "nan": (re.compile(r"\.(?:nan|NaN|NAN)"), lambda _: math.nan),
        "str": (re.compile(r".*", re.DOTALL), str),
    }

    processing_version = (1, 2)  # also of a text that begins with %YAML 1.1

    def __init__(self, version: Any, loader: Any) -> None:  # noqa: ARG002 - ruamel.yaml passes it
        super().__init__(loader)

    def resolve(self, kind: type[Node], value: str, implicit: tuple[bool, bool]) -> Tag:
        if kind is not ScalarNode:
            return _ResolvedTag(suffix="collection")
        names = self.SCALARS if implicit[0] else ("str",)
        return _ResolvedTag(suffix=next(name for name in names if self.SCALARS[name][0].fullmatch(value)))


class _Tree:
    """The entries of the nodes of a text; nodes that an alias repeats have the same value."""

    def __init__(self, source: str, *, has_lines: bool) -> None:
        self._source, self._has_lines = source, has_lines
        self._values: dict[Node, Any] = {}
        self._begun: set[Node] = set()

    def entry(self, node: Node, key: Node | None = None) -> JobEntry:
        position = self._position(key or node)
        if node not in self._values:
            if node in self._begun:
                raise JobFileError(f"{position}: an alias is used inside its own anchor.")
            self._begun.add(node)
            self._values[node] = self._value(node)
        return JobEntry(self._values[node], position)

    def _value(self, node: Node) -> Any:
        self._check_tag(node)
        if isinstance(node, ScalarNode):
            return _CoreSchema.SCALARS[str(node.tag)][1](node.value)
        if isinstance(node, MappingNode):
            return self._mapping(node)
        return [self.entry(item) for item in node.value]

    def _mapping(self, node: MappingNode) -> dict[str, JobEntry]:
        entries: dict[str, JobEntry] = {}
        for key, value in node.value:
            position = self._position(key)
            if not isinstance(key, ScalarNode):
                raise JobFileError(f"{position}: a key must be a word, and this is a list or a mapping.")
            self._check_tag(key)
            if key.value in entries:
                before = entries[key.value].position
                raise JobFileError(f"{position}: the key {key.value!r} is already at {before}.")
            entries[key.value] = self.entry(value, key)
        return entries

    def _check_tag(self, node: Node) -> None:
        if not isinstance(node.ctag, _ResolvedTag):
            tag = str(node.tag).replace("tag:yaml.org,2002:", "!!")
            raise JobFileError(
                f"{self._position(node)}: the tag {tag} has no meaning in a job file. Remove it."
            )

    def _position(self, node: Node) -> str:
        return f"{self._source}:{node.start_mark.line + 1}" if self._has_lines else self._source


def read_tree(text: str, source: str, *, has_lines: bool = True) -> JobEntry:
    """Parse a YAML text.

    Args:
        text: text of one YAML document.
        source: name of the file that the text comes from, or the quoted command line argument.
        has_lines: whether entries have positions by line; otherwise the source is the position of all entries.

    Raises:
        JobFileError: if the text is not YAML, is empty or has more than one document; names the line.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _CoreSchema
    try:
        node = yaml.compose(text)
        if node is None:
            raise JobFileError(f"{source}: the file is empty.")
        return _Tree(source, has_lines=has_lines).entry(node)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f"{source}:{mark.line + 1}" if mark and has_lines else source
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise JobFileError(f"{position}: this is not YAML: {what}.") from error
    except YAMLError as error:  # characters that YAML does not allow
        raise JobFileError(f"{source}: this is not YAML: {error}".rstrip(".") + ".") from error


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return a sentence that names the most similar word, or all of them."""
    words = list(known)
    return did_you_mean(word, words, otherwise=f"There is: {', '.join(words)}.")


IMPORT = "import"
ARGUMENTS = "arguments"

SECTIONS = ("data", "model", "params", "spark", "tracking", "registry", "output", "code", "predict")
"""The sections of a job."""

SHORT_FORMS = {"model": IMPORT, "tracking": "mode", "registry": "name"}
"""Sections that may be a plain value, and the key that this value sets."""

SOURCES = ("table", "parquet", "sql")
"""Sources of rows; a job has one."""

_UNDIVIDED = ("spark", "config")
"""Path of a section whose keys contain dots."""


@dataclass(frozen=True)
class Override:
    """An argument ``KEY=VALUE``.

    Attributes:
        path: keys that lead to the value; begins with ``params`` for a Param.
        entry: the value, with its position.
    """

    path: tuple[str, ...]
    entry: JobEntry


def read_override(argument: str) -> Override:
    """Parse an argument; a key that is not a section is a Param.

    Raises:
        JobFileError: if the argument is not of the form ``KEY=VALUE``, or a job cannot have the key.
    """
    key, equals, text = argument.partition("=")
    position = f"the argument {argument!r}"
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise JobFileError(
            f"{position} is not of the form KEY=VALUE, as epochs=3 or data.table=sales.rows are."
        )
    if path[: len(_UNDIVIDED)] == _UNDIVIDED:
        rest = ".".join(path[len(_UNDIVIDED) :])
        path = (*_UNDIVIDED, rest) if rest else _UNDIVIDED
    if path[0] not in SECTIONS:
        if len(path) > 1 and path[1] != ARGUMENTS:
            raise JobFileError(f"{position}: a job has no {path[0]!r}. {suggestion(path[0], SECTIONS)}")
        path = ("params", *path)
    entry = read_tree(text, position, has_lines=False) if text.strip() else JobEntry(None, position)
    return Override(path, entry)


def apply_overrides(job: JobEntry, overrides: Sequence[Override]) -> JobEntry:
    """Return a job with the overrides applied in order.

    A mapping replaces a mapping as a whole, and an empty value removes a key. A source of rows replaces another one.

    Raises:
        JobFileError: if an override has a key below a value that is not a mapping.
    """
    for override in overrides:
        for other in _other_sources(override):
            job = _with(job, other, Override(other, JobEntry(None, override.entry.position)))
        job = _with(job, override.path, override)
    return job


def _other_sources(override: Override) -> list[tuple[str, ...]]:
    """Return the paths of the other sources of rows, if the override sets one."""
    path = override.path
    is_source = path[:-1] in (("data",), ("data", "test"), ("predict",)) and path[-1] in SOURCES
    if not is_source or override.entry.value is None:
        return []
    return [(*path[:-1], kind) for kind in SOURCES if kind != path[-1]]


def _with(entry: JobEntry, path: tuple[str, ...], override: Override) -> JobEntry:
    if not path:
        return override.entry
    key, rest = path[0], path[1:]
    value = _as_mapping(entry.value, override, path)
    inner = value.get(key, JobEntry(None, override.entry.position))
    if key in SHORT_FORMS and len(rest) and not isinstance(inner.value, dict | None):
        inner = JobEntry({SHORT_FORMS[key]: inner}, inner.position)
    return JobEntry({**value, key: _with(inner, rest, override)}, entry.position)


def _as_mapping(value: Any, override: Override, path: tuple[str, ...]) -> dict[str, JobEntry]:
    if isinstance(value, dict):
        return value
    if value is None:
        return {}
    if isinstance(value, str) and path[0] == ARGUMENTS:  # the value is an import path
        return {IMPORT: JobEntry(value, override.entry.position)}
    above = ".".join(override.path[: len(override.path) - len(path)])
    raise JobFileError(f"{override.entry.position}: {above} is {value!r}, which has no {path[0]!r} below it.")


def write_tree(content: Mapping[str, Any]) -> str:
    """Return values that JSON can hold as YAML."""
    text = io.StringIO()
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False
    yaml.dump(dict(content), text)
    return text.getvalue()
