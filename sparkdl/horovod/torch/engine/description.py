"""What the ranks must agree on before a request may run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any

_LONGEST_SHAPES = 120


class Kind(str, Enum):
    """What a request does, by the names that Horovod's messages have for it."""

    ALLREDUCE = "ALLREDUCE"
    ADASUM = "ADASUM"
    ALLGATHER = "ALLGATHER"
    BROADCAST = "BROADCAST"
    ALLTOALL = "ALLTOALL"
    REDUCESCATTER = "REDUCESCATTER"
    BARRIER = "BARRIER"
    JOIN = "JOIN"
    PROCESS_SETS = "PROCESS_SETS"


@dataclass(frozen=True, kw_only=True)
class Description:
    """One rank's request, without its data.

    Attributes:
        kind: what it does.
        name: by which it is matched with the requests of the other ranks, such as ``"allreduce.weight"``.
        dtypes: of its tensors, as NumPy spells them; several when the request is for a group of tensors.
        shapes: of its tensors.
        op: number of the reduction; -1 where there is none.
        prescale: factor before the reduction.
        postscale: factor after it.
        root: rank in the process set that data come from; -1 where there is none.
        root_rank: the same rank by its number among all ranks.
        about: what else the ranks must agree on, in words, such as ``"add process set [0, 1]"``.
    """

    kind: Kind
    name: str
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    op: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    root_rank: int = -1
    about: str = ""

    @cached_property
    def label(self) -> str:
        """One line that is the same for two requests exactly if they can run together."""
        terms = [
            f"{dtype}{list(shape)}" for dtype, shape in zip(self.dtypes, self._fixed_shapes, strict=True)
        ]
        shapes = "+".join(terms)
        if len(shapes) > _LONGEST_SHAPES:
            digest = hashlib.blake2b(shapes.encode(), digest_size=8).hexdigest()
            shapes = f"{len(terms)} tensors #{digest}"
        options = []
        if self.op >= 0:
            options.append(f"op={self.op}")
        if (self.prescale, self.postscale) != (1.0, 1.0):
            options.append(f"scales={float(self.prescale)!r},{float(self.postscale)!r}")
        if self.root >= 0:
            options.append(f"root={self.root}")
        if self.about:
            options.append(self.about)
        return " ".join([self.name, self.kind.value, *([shapes] if shapes else []), *options])

    @property
    def operation(self) -> str:
        """What was called, as the name has it: ``"grouped_allreduce"``, of which there is no kind."""
        return self.name.partition(".")[0]

    @property
    def given_name(self) -> str | None:
        """What the caller called it; None if it was numbered, or goes without a name."""
        given = self.name.partition(".")[2]
        return given if given and not given.startswith("noname.") else None

    @property
    def _fixed_shapes(self) -> list[list[Any]]:
        if self.kind not in (Kind.ALLGATHER, Kind.ALLTOALL):
            return [list(shape) for shape in self.shapes]
        return [["*", *shape[1:]] if shape else [] for shape in self.shapes]

    @cached_property
    def text(self) -> str:
        """The attributes in one line, for :func:`parse_description`."""
        return json.dumps(asdict(self))


@lru_cache(maxsize=4096)
def parse_description(text: str) -> Description:
    """The description that a rank sent as its ``text``; what comes again in every step is parsed once."""
    entries = json.loads(text)
    shapes = tuple(tuple(shape) for shape in entries["shapes"])
    kind, dtypes = Kind(entries["kind"]), tuple(entries["dtypes"])
    return Description(**{**entries, "kind": kind, "dtypes": dtypes, "shapes": shapes})
