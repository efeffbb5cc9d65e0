"""The state of a rank as its barrier task reports it to the driver: its health while it runs, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from sparkdl.collective.telemetry.stalls import Wait
from sparkdl.launch.wire.messages import unpack_error


@dataclass(frozen=True, kw_only=True)
class RankHealth:
    """State of a running rank as seen from outside: whether its process responds, and in which operations it waits."""

    silent_s: float = 0.0
    """Seconds since the last heartbeat of its process."""

    state: str = ""
    """Why its process cannot continue, according to the kernel, such as ``is stopped, as by SIGSTOP``; else empty."""

    idle_s: float | None = None
    """Seconds since its function last called ``context.progress()``; None if it never has, or is done."""

    waits: tuple[Wait, ...] = ()
    """The operations in which it waits for other ranks, the longest wait first."""

    world: int = 0
    """Number of the world in which its process was at the last heartbeat; 0 outside of elastic launches."""

    def within(self, world: int) -> RankHealth:
        """The same state without what concerns an earlier world, whose ranks had other numbers."""
        return self if self.world == world else replace(self, waits=(), idle_s=None)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> RankHealth:
        """Make it from all its fields, also after a round trip through JSON."""
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
    """Time of ``time.monotonic()`` at which the task last sent anything."""

    number: int
    """Number of the report, counted by the task."""

    health: RankHealth


class StopReason(str):
    """Text that says why a rank is ended from outside.

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
    """Origin of the error that the rank raised: a value of :class:`~sparkdl.collective.error_origin.Origin`."""

    is_loss: bool = False
    """Whether the rank's process was killed or lost with its executor, and not ended by an exception of its code."""

    is_hang: bool = False
    """Whether all ranks were ended because one of them hung."""

    health: RankHealth | None = None
    """Health of the rank just before it was ended from outside; None if it was not."""

    stack: str = ""
    """Python stacks of the rank's threads at that time; empty if they are not known."""

    pickled: bytes = field(default=b"", repr=False)
    """The exception itself, if it can be packed; the driver unpacks it only if it was received through Spark."""

    @cached_property
    def exception(self) -> BaseException | None:
        """The unpickled exception; None if the rank sent none. Only for a failure that was received through Spark."""
        return unpack_error(self.pickled)

    def to_json(self) -> bytes:
        """Encode all fields but the pickled exception."""
        return json.dumps({**asdict(self), "pickled": ""}).encode()

    @classmethod
    def from_json(cls, text: bytes, *, pickled: bytes = b"") -> Failure:
        """Decode what :meth:`to_json` made."""
        fields = json.loads(text)
        health = fields["health"] and RankHealth.from_fields(fields["health"])
        return cls(**{**fields, "health": health, "pickled": pickled})
