"""What a rank that is not in a process set has in place of its communicator. Runs on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkdl.errors import ParamError
from sparkdl.topology import name_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence


class Outsider:
    """Refuses whatever a :class:`~sparkdl.collective.communicator.Communicator` does, but can be closed like one.

    Args:
        rank: number of this rank in the communicator that was split.
        name: of the process set.
        members: its ranks, by their numbers there.

    Attributes:
        is_member: False.
    """

    is_member = False

    def __init__(self, *, rank: int, name: str, members: Sequence[int]) -> None:
        self._who = f"rank {rank} is not in process set {name!r} of {name_ranks(members)}"

    def __enter__(self) -> Outsider:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def close(self) -> None:
        """Nothing: it holds nothing."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise ParamError(f"{self._who}: {attribute!r} is for its members. Ask is_member before.")
