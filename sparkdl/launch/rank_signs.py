"""What is known of a rank from outside: whether it lives, and what it waits in. From the tasks to the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sparkdl.collective.telemetry.stalls import Wait


@dataclass(frozen=True, kw_only=True)
class RankSigns:
    """The signs of one rank at one moment."""

    host: str = ""

    silent_s: float = 0.0
    """Seconds since its process last gave a sign of life."""

    state: str = ""
    """Why its process cannot go on, as the kernel says, in words: ``is stopped, as by SIGSTOP``."""

    idle_s: float | None = None
    """Seconds since its function last called ``context.progress()``; None if it never has, or is done."""

    waits: tuple[Wait, ...] = ()
    """What it waits in for other ranks, the longest wait first."""

    def to_fields(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> RankSigns:
        """Decode what :meth:`to_fields` made."""
        waits = tuple(
            Wait(name, tuple(ranks), operation, waited_s, timeout_s)
            for name, ranks, operation, waited_s, timeout_s in fields["waits"]
        )
        return cls(**{**fields, "waits": waits})

    def in_words(self) -> str:
        """Where the rank is, as part of a sentence."""
        if self.waits:
            said = "; ".join(
                f"{wait.operation} on {wait.communicator!r} for {wait.waited_s:.0f} s" for wait in self.waits
            )
            return f"waiting in {said}"
        if self.state:
            return f"whose process {self.state}"
        return "in no operation that waits for other ranks"
