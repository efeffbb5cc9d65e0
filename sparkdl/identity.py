"""The identity of a fit, a job or a feed: what has to be equal for one to continue or to stand for another.

An identity is a dict of values that JSON can hold, by names that error messages use: the settings, the names and shapes
of tensors, and what the rows are. A value that is a :func:`checksum` is compared, but not shown. None stands for what
is not known, which is equal to anything.

Rows are identified in three ways, for three cases. A feed continues on the files that it has read: file names, row
counts and versions identify the rows, and no row is read. A fit may continue after its rows were written again, to
files of other names: a checksum of rows identifies them, and the feed of a fit has no identity of its own. Rows that
are not written yet are identified by the DataFrame object, the settings of its session and the input files.

Names and shapes of tensors are compared twice when a fit continues, as a callback may add or replace layers. The
identity has the tensors of the model that the fit begins with; it is compared on the driver before ranks start. The
manifest of a checkpoint has those of the model as it was trained; it is compared before they are loaded. A script has
no identity, and compares the manifest alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

_SHOWN = 5
_LONGEST = 400
_MISSING = object()


def as_checksum(digits: str) -> str:
    """Return the digits of a hash as the value of an identity: ``#`` and the digits."""
    return f"#{digits}"


def checksum(content: bytes) -> str:
    """Return the checksum of a content as the value of an identity: 16 hexadecimal digits of its SHA-256."""
    return as_checksum(hashlib.sha256(content).hexdigest()[:16])


def digest(identity: Mapping[str, Any]) -> str:
    """Return the hash of an identity, 24 hexadecimal digits."""
    return hashlib.sha256(_text(identity).encode()).hexdigest()[:24]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between two identities, as texts for an error message: the first five, and how many more."""
    texts = [text for name in {**before, **now} for text in _compare(name, before, now)]
    return texts if len(texts) <= _SHOWN else [*texts[:_SHOWN], f"{len(texts) - _SHOWN} more"]


def _compare(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    was, is_ = before.get(name, _MISSING), now.get(name, _MISSING)
    if was is None or is_ is None:
        return
    if isinstance(was, Mapping) and isinstance(is_, Mapping):
        yield from (f"{name}: {text}" for key in {**was, **is_} for text in _compare(key, was, is_))
    elif all(isinstance(value, str) and value.startswith("#") for value in (was, is_)):
        if was != is_:
            yield f"changed: {name}"
    elif _text(was) != _text(is_):
        yield f"{name} was {_show(was)} and is {_show(is_)}"


def _text(value: Any) -> str:
    """Return a value as JSON, in which 0, 0.0 and false differ."""
    return "" if value is _MISSING else json.dumps(value, sort_keys=True)


def _show(value: Any) -> str:
    if value is _MISSING:
        return "not there"
    text = "there" if isinstance(value, str) and value.startswith("#") else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
