"""Where a blend of feeds stands, as a dict for JSON, and whether another blend can go on from there.

Runs on every *rank*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.data.state_checks import StateKind, is_count
from sparkdl.errors import ParamError

_KIND = StateKind("blend", ("version", "blend", "steps_done", "drawn", "feeds"), version=1)


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
        "version": _KIND.version,
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
    _KIND.check(state)
    then = state["blend"] if isinstance(state["blend"], Mapping) else {}
    for key, value in settings.items():
        if then.get(key) != value:
            raise ParamError(
                f"This blend has {key} {value}, but the state is of one with {then.get(key)}. Resume with the same "
                "settings, or begin anew."
            )
    names, drawn = settings["feeds"], state["drawn"]
    is_counts = isinstance(drawn, Sequence) and all(map(is_count, drawn))
    if not is_counts or len(drawn) != len(names):
        raise _KIND.impossible("drawn", drawn, f"a list of {len(names)} whole numbers, at least 0")
    if not is_count(state["steps_done"]):
        raise _KIND.impossible("steps_done", state["steps_done"], "a whole number, at least 0")
    if not isinstance(state["feeds"], Mapping) or set(state["feeds"]) != set(names):
        raise _KIND.impossible("feeds", state["feeds"], f"a dict of the states of {', '.join(names)}")
    return BlendState(steps_done=state["steps_done"], drawn=tuple(drawn), feeds=state["feeds"])
