"""What members and driver tell each other: the arrival of a member, and the world that it is to enter."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

ARRIVALS = "arrivals"
"""Queue of the rendezvous to which members post their arrivals, and the coordinator their losses."""


def answer_key(arrival: int) -> str:
    """The key of the answer to an arrival, by its number in the queue."""
    return f"answers/{arrival}"


def leave_key(world: int) -> str:
    """The key that is set when the members of a world are to leave it after their current step."""
    return f"leave/{world}"


def broken_key(world: int) -> str:
    """The key that is set when a member of a world is lost, with its number as text."""
    return f"broken/{world}"


@dataclass(frozen=True, kw_only=True)
class MemberArrival:
    """A member that waits for the next world, or that was lost.

    Attributes:
        member: number of the member.
        after: number of the world that it has left; 0 if it has just started.
        progress: how far its state has come, such as a number of steps; -1 if it has no state.
        is_done: whether its function has returned.
        is_lost: whether its process has ended.
    """

    member: int
    after: int = 0
    progress: int = -1
    is_done: bool = False
    is_lost: bool = False

    def to_json(self) -> bytes:
        """Encode it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> MemberArrival:
        """Decode what :meth:`to_json` made."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class World:
    """The members that run together until one of them is lost or another one joins.

    Attributes:
        number: number of the world, from 1.
        members: numbers of the members, in order of rank. Rank 0 has come farthest.
        has_state: whether rank 0 has a state, which other ranks take over.
        lease: name under which the ranks of this world use the folder of their checkpoints; empty for none.
    """

    number: int
    members: tuple[int, ...]
    has_state: bool = False
    lease: str = ""

    def to_fields(self) -> dict[str, Any]:
        """All fields, in types that JSON can encode."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> World:
        """Decode what :meth:`to_fields` made."""
        return cls(**{**fields, "members": tuple(fields["members"])})


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The driver's answer to an arrival.

    Attributes:
        world: world that the member is to enter; None if there is none for it.
        refusal: why there is none; empty if the run is over.
    """

    world: World | None = None
    refusal: str = ""

    def to_json(self) -> bytes:
        """Encode it."""
        return json.dumps({"world": self.world and self.world.to_fields(), "refusal": self.refusal}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Answer:
        """Decode what :meth:`to_json` made."""
        fields = json.loads(text)
        world = fields["world"]
        return cls(world=world and World.from_fields(world), refusal=fields["refusal"])
