"""What members and driver tell each other: the arrival of a member, and the world that it is to enter."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

ARRIVALS = "arrivals"
"""Queue of the rendezvous to which members post their arrivals, and the coordinator their losses."""


ANSWER_KEY = "answers/{}"
"""The key of the answer to an arrival, by its number in the queue."""

LEAVE_KEY = "leave/{}"
"""The key that is set when the members of a world, by its number, are to leave it after their current step."""

BROKEN_KEY = "broken/{}"
"""The key that is set when the members have to leave a world, by its number, at once, with the reason as text.

If the world has ended otherwise, it is set to an empty text."""


@dataclass(frozen=True, kw_only=True)
class JsonMessage:
    """The base of dataclasses that processes send each other as JSON."""

    def to_json(self) -> bytes:
        """Encode the message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Decode what :meth:`to_json` made."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class MemberArrival(JsonMessage):
    """A rank that waits for the next world, or that was lost, is to leave or has returned.

    Attributes:
        member: number of its member, the ranks that live and end together.
        place: number of the rank among those of its member.
        after: number of the world that it has left; 0 if it has just started.
        progress: how far its state has come, such as a number of steps; -1 if it has no state.
        is_done: whether its function has returned.
        has_left: whether it waits for no answer, as its member returns the values of the run.
        is_leaving: whether its member is to leave the run after the current step; this is not an arrival yet.
        is_lost: whether its process has ended.
    """

    member: int
    place: int = 0
    after: int = 0
    progress: int = -1
    is_done: bool = False
    has_left: bool = False
    is_leaving: bool = False
    is_lost: bool = False


@dataclass(frozen=True, kw_only=True)
class World:
    """The members that run together until one of them is lost or another one joins.

    Attributes:
        number: number of the world, from 1.
        members: numbers of the members, in order of their ranks. That of rank 0 has come farthest.
        group_size: number of ranks of each member, which follow each other.
        progress: how far the state of the farthest rank has come; -1 if none has a state.
        lease: name under which the ranks of this world use the folder of their checkpoints; empty for none.
    """

    number: int
    members: tuple[int, ...]
    group_size: int = 1
    progress: int = -1
    lease: str = ""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.members) * self.group_size

    @property
    def has_state(self) -> bool:
        """Whether a rank has a state, which other ranks take over."""
        return self.progress >= 0

    def rank_of(self, member: int, place: int = 0) -> int:
        """The rank at a place of a member."""
        return self.members.index(member) * self.group_size + place


@dataclass(frozen=True, kw_only=True)
class Answer(JsonMessage):
    """The driver's answer to an arrival.

    Attributes:
        world: world that the member is to enter; None if there is none for it.
        refusal: why there is none; empty if the run is over.
    """

    world: World | None = None
    refusal: str = ""

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Decode what :meth:`to_json` made."""
        fields = json.loads(text)
        if world := fields["world"]:
            fields["world"] = World(**{**world, "members": tuple(world["members"])})
        return cls(**fields)
