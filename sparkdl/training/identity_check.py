"""Tells whether a fit may go on from checkpoints, by the identities of both.

Runs on the *driver* and on a *rank*.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkdl.errors import CheckpointError

_UNREADABLE = frozenset({"row groups", "training rows", "first rows", "rows", "parameters of the optimizer"})
"""What is a checksum, which tells nobody anything."""


def check_identity(then: Mapping[str, Any], now: Mapping[str, Any], url: str) -> None:
    """Check that a fit may go on from the checkpoints at a URL.

    Args:
        then: identity of the fit that wrote them.
        now: identity of the fit that reads them.
        url: of the folder, for the error.

    Raises:
        CheckpointError: naming what differs.
    """
    differences = [
        *_differing_model(then, now),
        *_differing_dataset(then.get("dataset", {}), now["dataset"]),
        *_differing("", then.get("settings", {}), now["settings"]),
    ]
    if differences:
        raise CheckpointError(
            f"checkpointDir {url} holds checkpoints of another fit: {'; '.join(differences)}. Choose another "
            "checkpointDir, make these as they were, or remove the checkpoints."
        )


def _differing_model(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The first difference alone: of another model nearly all is different."""
    for what in ("tensors", "modules"):
        was, is_ = then.get(what, {}), now.get(what, {})
        for name in {**was, **is_}:
            if was.get(name) != is_.get(name):
                of = f"the model's {name}" if name else "the model"
                return [f"{of} was {was.get(name, 'not there')} and is {is_.get(name, 'not there')}"]
    return []


def _differing_dataset(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    # Older checkpoints and large datasets do not tell of all rows, and other first ones are other rows anyway.
    if not (then.get("rows") and now["rows"] and then.get("first rows") == now["first rows"]):
        then, now = {**then, "rows": None}, {**now, "rows": None}
    return _differing("the dataset's ", then, now)


def _differing(what: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    differences = []
    for name in {**then, **now}:
        # What is not there is None: nobody has set it.
        was, is_ = then.get(name), now.get(name)
        if was == is_:
            continue
        if name.startswith("column ") and (was is None or is_ is None):
            differences.append(f"{what}{name} {'was' if was is None else 'is'} not there")
        else:
            values = "were others" if name in _UNREADABLE else f"was {was!r} and is {is_!r}"
            differences.append(f"{what}{name} {values}")
    return differences
