"""How a rank ended, as it travels from its barrier task to the driver."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


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

    is_loss: bool = False
    """Whether the rank's process was killed, or went with its executor, and no code of it raised anything."""

    pickled: bytes = field(default=b"", repr=False)
    """The exception itself, packed where it can be; unpacked by the driver only after it came through Spark."""

    def to_fields(self) -> dict[str, Any]:
        """Everything but the pickled exception, as JSON can hold it."""
        fields = asdict(self)
        del fields["pickled"]
        return fields

    def to_json(self) -> str:
        """Encode :meth:`to_fields` as JSON."""
        return json.dumps(self.to_fields())

    @classmethod
    def from_json(cls, text: str | bytes, *, pickled: bytes = b"") -> Failure:
        """Decode what :meth:`to_json` made."""
        return cls(**json.loads(text), pickled=pickled)


def find_culprit(failures: Iterable[Failure]) -> Failure | None:
    """Choose the failure to report: the first that is no consequence of another one, else the first."""
    ordered = list(failures)
    return next(
        (failure for failure in ordered if not failure.is_consequence), ordered[0] if ordered else None
    )
