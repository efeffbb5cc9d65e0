"""The state of a rank as its barrier task reports it to the driver: its health while it runs, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeAlias

from sparkdl.collective.telemetry.stalls import Wait


@dataclass(frozen=True, kw_only=True)
class RankHealth:
    """What is known of a running rank from outside: whether its process responds, and what it waits in."""

    silent_s: float = 0.0
    """Seconds since the last heartbeat of its process."""

    state: str = ""
    """Why its process cannot continue, as the kernel says, in words: ``is stopped, as by SIGSTOP``."""

    idle_s: float | None = None
    """Seconds since its function last called ``context.progress()``; None if it never has, or is done."""

    waits: tuple[Wait, ...] = ()
    """The operations in which it waits for other ranks, the longest wait first."""

    def to_fields(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> RankHealth:
        """Decode what :meth:`to_fields` made."""
        waits = tuple(
            Wait(name, tuple(ranks), operation, waited_s, timeout_s)
            for name, ranks, operation, waited_s, timeout_s in fields["waits"]
        )
        return cls(**{**fields, "waits": waits})

    def describe(self) -> str:
        """What the rank is doing, as part of a sentence."""
        if self.waits:
            waits = "; ".join(
                f"{wait.operation} on {wait.communicator!r} for {wait.waited_s:.0f} s" for wait in self.waits
            )
            return f"waiting in {waits}"
        if self.state:
            return f"whose process {self.state}"
        return "in no operation that waits for other ranks"


class HealthReport(NamedTuple):
    """The latest report of a barrier task on its rank."""

    received_at: float
    """When the task last sent anything, as of ``time.monotonic()``."""

    number: int
    """Number of the report, counted by the task."""

    health: RankHealth


class StopReason(str):
    """Why a rank is ended from outside, in words.

    Attributes:
        is_hang: whether a rank hangs, so that the stacks of all ranks are wanted.
    """

    is_hang: bool

    def __new__(cls, text: str, *, is_hang: bool = False) -> StopReason:
        """Make a reason from its text."""
        reason = super().__new__(cls, text)
        reason.is_hang = is_hang
        return reason


OnStop: TypeAlias = "Callable[[StopReason], None]"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank did not return a value."""

    rank: int

    error: str
    """Type and message of the exception, or how the process ended."""

    traceback: str
    """The rank's Python traceback, or its last log lines when it died without one."""

    host: str = ""

    is_consequence: bool = False
    """Whether another rank's failure, or a cancelled fit, caused this one."""

    origin: str = ""
    """Where an error that the rank raised began: the value of an :class:`~sparkdl.collective.failure_origin.Origin`."""

    is_loss: bool = False
    """Whether the rank's process was killed, or was lost with its executor, and none of its code raised anything."""

    is_hang: bool = False
    """Whether all ranks were ended because one of them hung."""

    health: RankHealth | None = None
    """The health of a rank that was ended from outside, just before that."""

    stack: str = ""
    """The Python stacks of such a rank's threads."""

    pickled: bytes = field(default=b"", repr=False)
    """The exception itself, if it can be packed; the driver unpacks it only after it came through Spark."""

    def to_fields(self) -> dict[str, Any]:
        """Everything but the pickled exception, as JSON can hold it."""
        fields = asdict(self)
        del fields["pickled"]
        return fields

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], *, pickled: bytes = b"") -> Failure:
        """Decode what :meth:`to_fields` made."""
        health = fields.get("health")
        decoded = RankHealth.from_fields(health) if health is not None else None
        return cls(**{**fields, "health": decoded}, pickled=pickled)

    def to_json(self) -> str:
        """Encode :meth:`to_fields` as JSON."""
        return json.dumps(self.to_fields())

    @classmethod
    def from_json(cls, text: str | bytes, *, pickled: bytes = b"") -> Failure:
        """Decode what :meth:`to_json` made."""
        return cls.from_fields(json.loads(text), pickled=pickled)
