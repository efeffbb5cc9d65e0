"""The state of a rank as its barrier task reports it to the driver: signs of life, and how the rank ended.

The signs are what is known of a rank from outside: whether it lives, and what it waits in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from sparkdl.collective.job import Origin
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


class StopReason(str):
    """Why a rank is ended from outside, in words.

    Attributes:
        is_hang: whether some rank stands still, so that it is of interest where all of them are.
    """

    is_hang: bool

    def __new__(cls, text: str, *, is_hang: bool = False) -> StopReason:
        """Make one of its words."""
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
    """Whether another rank's failure, or a cancelled fit, is behind this one."""

    origin: str = ""
    """Where an error that the rank raised began: the value of an :class:`~sparkdl.collective.job.Origin`."""

    is_loss: bool = False
    """Whether the rank's process was killed, or went with its executor, and no code of it raised anything."""

    is_hang: bool = False
    """Whether all ranks were ended because some rank stood still."""

    signs: RankSigns | None = None
    """What was known of a rank that was ended from outside, just before that."""

    stack: str = ""
    """The Python stacks of such a rank's threads."""

    pickled: bytes = field(default=b"", repr=False)
    """The exception itself, packed where it can be; unpacked by the driver only after it came through Spark."""

    def to_fields(self) -> dict[str, Any]:
        """Everything but the pickled exception, as JSON can hold it."""
        fields = asdict(self)
        del fields["pickled"]
        return fields

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], *, pickled: bytes = b"") -> Failure:
        """Decode what :meth:`to_fields` made."""
        signs = fields.get("signs")
        known = RankSigns.from_fields(signs) if signs is not None else None
        return cls(**{**fields, "signs": known}, pickled=pickled)

    def to_json(self) -> str:
        """Encode :meth:`to_fields` as JSON."""
        return json.dumps(self.to_fields())

    @classmethod
    def from_json(cls, text: str | bytes, *, pickled: bytes = b"") -> Failure:
        """Decode what :meth:`to_json` made."""
        return cls.from_fields(json.loads(text), pickled=pickled)


def find_culprit(failures: Iterable[Failure]) -> Failure | None:
    """Choose the failure to report.

    The first that began on its own rank; else one of those that the ranks share; else the first consequence.
    """
    ordered = list(failures)
    causes = [failure for failure in ordered if not failure.is_consequence]
    own = [failure for failure in causes if failure.origin != Origin.SHARED.value]
    return next(iter([*own, *causes, *ordered]), None)


def were_ranks_lost(failures: Sequence[Failure], returned: Collection[int], num_ranks: int) -> bool:
    """Whether the failures of a launch, whose culprit is a consequence, mean that a rank was lost.

    Not if every rank has told how it ended and none missed another one: what they ran made one leave or end the
    communicator while others needed it, which it would do again.

    Args:
        failures: of the ranks that failed.
        returned: the ranks whose function returned.
        num_ranks: how many there were.
    """
    told = {failure.rank for failure in failures} | set(returned)
    origins = {failure.origin for failure in failures}
    return (
        len(told) < num_ranks
        or any(failure.is_loss for failure in failures)
        or Origin.LOST.value in origins
        # That which was waited for has returned without taking part.
        or (Origin.LATE.value in origins and not returned)
    )
