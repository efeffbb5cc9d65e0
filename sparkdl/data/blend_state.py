"""Where a blend of feeds stands, as a dict for JSON, and whether another blend can go on from there.

Runs on every *rank*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import DataError, ParamError

_VERSION = 1
_PARTS = ("version", "blend", "steps_done", "drawn", "feeds")


@dataclass(frozen=True, kw_only=True)
class BlendState:
    """How far the ranks have come with a blend.

    Attributes:
        steps_done: batches that each rank has had.
        drawn: how many samples each feed has served on every rank, in the order of the feeds.
        feeds: by name where each feed stands.
    """

    steps_done: int
    drawn: tuple[int, ...]
    feeds: Mapping[str, Any]


def to_json(
    settings: Mapping[str, Any], steps_done: int, drawn: Sequence[int], feeds: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a state as :func:`json.dumps` takes it.

    Args:
        settings: what two blends must have in common for one to go on where the other stopped.
        steps_done: batches that each rank has had.
        drawn: how many samples each feed has served.
        feeds: by name where each feed stands.
    """
    return {
        "version": _VERSION,
        "blend": dict(settings),
        "steps_done": steps_done,
        "drawn": list(drawn),
        "feeds": dict(feeds),
    }


def from_json(state: Any, settings: Mapping[str, Any]) -> BlendState:
    """Return what a state says.

    Raises:
        ParamError: if it is no state of a blend, or of one of other settings; it names what differs.
        DataError: if a newer version wrote it.
    """
    missing = [part for part in _PARTS if not isinstance(state, Mapping) or part not in state]
    if missing:
        lacks = f" It lacks {', '.join(missing)}." if len(missing) < len(_PARTS) else ""
        raise ParamError(
            f"This is no state of a blend: {str(state)[:80]}.{lacks} Give what a BlendedFeed's state() returned, a "
            f"dict of {', '.join(_PARTS)}."
        )
    if state["version"] != _VERSION:
        raise DataError(
            f"The state has version {state['version']}; this sparkdl reads version {_VERSION}. Resume with the "
            "version of sparkdl that wrote it."
        )
    then = state["blend"] if isinstance(state["blend"], Mapping) else {}
    for key, value in settings.items():
        if then.get(key) != value:
            raise ParamError(
                f"This blend has {key} {value}, but the state is of one with {then.get(key)}. Resume with the same "
                "settings, or begin anew."
            )
    names, drawn = settings["feeds"], state["drawn"]
    is_counts = isinstance(drawn, Sequence) and all(isinstance(count, int) and count >= 0 for count in drawn)
    if not is_counts or len(drawn) != len(names):
        raise _impossible("drawn", drawn, f"a list of {len(names)} whole numbers, at least 0")
    if not isinstance(state["steps_done"], int) or state["steps_done"] < 0:
        raise _impossible("steps_done", state["steps_done"], "a whole number, at least 0")
    if not isinstance(state["feeds"], Mapping) or set(state["feeds"]) != set(names):
        raise _impossible("feeds", state["feeds"], f"a dict of the states of {', '.join(names)}")
    return BlendState(steps_done=state["steps_done"], drawn=tuple(drawn), feeds=state["feeds"])


def _impossible(part: str, value: Any, expected: str) -> ParamError:
    return ParamError(
        f"This is no state of a blend: {part} is {str(value)[:80]}, and has to be {expected}. Give what a "
        "BlendedFeed's state() returned."
    )
