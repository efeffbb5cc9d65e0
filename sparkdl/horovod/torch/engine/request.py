"""The base class of the requests that an engine runs, and the check that the ranks' requests match.

A description holds what the ranks must agree on before a request may run. If ranks made different requests under one
name, the error has Horovod's message and says which rank made which request.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeVar, cast

from sparkdl.collective import Communicator

_LONGEST_SHAPES = 120


class Kind(str, Enum):
    """The kinds of requests, with their names in Horovod's messages."""

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
        kind: kind of the request.
        name: name under which it is matched with the requests of the other ranks, such as ``"allreduce.weight"``.
        dtypes: dtypes of its tensors, such as ``"float32"``; several if the request is for a group of tensors.
        shapes: shapes of its tensors.
        op: number of the reduction; -1 if there is none.
        prescale: factor applied before the reduction.
        postscale: factor applied after the reduction.
        root: number in the process set of the rank that sends; -1 if there is none.
        root_rank: number of the same rank among all ranks.
        device: type of the device of its tensors, such as ``"cuda"``, if they take a route of their own; else empty.
        about: further text that the ranks must agree on, such as ``"add process set [0, 1]"``.
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
    device: str = ""
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
        if self.device:
            options.append(f"on {self.device}")
        if self.about:
            options.append(self.about)
        return " ".join([self.name, self.kind.value, *([shapes] if shapes else []), *options])

    @cached_property
    def digest(self) -> int:
        """A number that differs for different labels, and is not zero."""
        return int.from_bytes(hashlib.blake2b(self.label.encode(), digest_size=7).digest(), "little") + 1

    @property
    def operation(self) -> str:
        """The operation that was called, from the name; also ``"grouped_allreduce"``, which is not a :class:`Kind`."""
        return self.name.partition(".")[0]

    @property
    def given_name(self) -> str | None:
        """The name that the caller gave; None if the request was numbered, or has no name."""
        name = self.name.partition(".")[2]
        return name if name and not name.startswith("noname.") else None

    @property
    def _fixed_shapes(self) -> list[list[Any]]:
        if self.kind not in (Kind.ALLGATHER, Kind.ALLTOALL):
            return [list(shape) for shape in self.shapes]
        return [["*", *shape[1:]] if shape else [] for shape in self.shapes]

    @cached_property
    def text(self) -> str:
        """The attributes as one line of JSON, which :func:`parse_description` reads."""
        return json.dumps(asdict(self))


@lru_cache(maxsize=4096)
def parse_description(text: str) -> Description:
    """Parse the ``text`` of a description; cached, as the same requests come in every step."""
    entries = json.loads(text)
    shapes = tuple(tuple(shape) for shape in entries["shapes"])
    kind, dtypes = Kind(entries["kind"]), tuple(entries["dtypes"])
    return Description(**{**entries, "kind": kind, "dtypes": dtypes, "shapes": shapes})


Result = TypeVar("Result")


class Request(ABC, Generic[Result]):
    """A requested operation. It runs once, on the thread that drives the engine.

    Attributes:
        description: description that the ranks must agree on.
        label: description in one line, used as the name of the communicator's operations.
        done: whether it has run or failed.
        is_awaited: whether a thread sleeps until it is done.
        blocks_caller: whether a thread waits for it, either asleep or driving the engine.
        error: error of the request if it has failed, else None.
        fused: requests that ``match`` has found to follow this one on all ranks, and that ``complete`` runs, too.
    """

    fused: Sequence[Request[Any]] = ()

    def __init__(self, description: Description) -> None:
        self.description = description
        self.label = description.label
        self.done = False
        self.is_awaited = False
        self.blocks_caller = False
        self.error: BaseException | None = None

    def look_ahead(self, outstanding: Callable[[], Sequence[Request[Any]]]) -> None:
        """Look at the requests after this one: some may run together with it. Called before ``match``.

        Args:
            outstanding: function that returns all requests in the order of submission, this one first.
        """

    @abstractmethod
    def match(self, communicator: Communicator) -> None:
        """Run the request's first operation on the communicator, under ``label``.

        Raises:
            MismatchError: on all ranks, if they are not at the same request. Nothing has been written then.
        """

    def complete(self, communicator: Communicator) -> None:  # not abstract: match may be enough
        """Run the rest of the request, which all ranks do now.

        Raises:
            HorovodInternalError: on all ranks, if the request cannot be carried out; other requests still can be.
        """

    def is_complete(self) -> bool:
        """Whether :meth:`result` would return at once, with a result that is complete on its device."""
        return self.done

    def result(self) -> Result:
        """The result of the request, None unless a subclass has one; only once it is done."""
        return cast(Result, None)


_OF_ONE_SHAPE = (Kind.ALLREDUCE, Kind.ADASUM, Kind.BROADCAST, Kind.REDUCESCATTER)

_WITHOUT_JOIN = {
    Kind.ALLGATHER: "Allgather is not supported with Join at this time. "
    "Specify sparse_to_dense=True if using DistributedOptimizer",
    Kind.ALLTOALL: "Alltoall is not supported with Join at this time.",
    Kind.BROADCAST: "Broadcast is not supported with Join at this time.",
    Kind.REDUCESCATTER: "Reducescatter is not supported with Join at this time.",
    Kind.PROCESS_SETS: "Adding and removing process sets is not supported with Join at this time.",
}


def find_mismatch(requests: Mapping[int, Description]) -> str | None:
    """Describe how the requests that ranks made under one name differ; None if they can run together.

    Args:
        requests: description of each rank's request, by rank.
    """
    (_, first), *others = sorted(requests.items())
    for _, other in others:
        if first.label != other.label:
            said = "; ".join(f"rank {rank}: {request.label}" for rank, request in sorted(requests.items()))
            return f"{_describe(first, other)} ({said})"
    return None


def refuse_join(kind: Kind, joined: list[int]) -> str | None:
    """Describe why a kind of request cannot run while ranks have joined; None if it can."""
    if not joined or kind not in _WITHOUT_JOIN:
        return None
    return f"{_WITHOUT_JOIN[kind]} (joined: {', '.join(f'rank {rank}' for rank in joined)})"


def _describe(one: Description, another: Description) -> str:
    """The first difference between two requests, in Horovod's words."""
    kind = one.kind.value
    if one.name == another.name:
        for mine, other in zip(one.dtypes, another.dtypes, strict=False):
            if mine != other:
                return f"Mismatched data types: One rank had type {mine}, but another rank had type {other}."
    if one.kind != another.kind:
        return _DID.format(kind, another.kind.value)
    if one.name != another.name:
        return _DID.format(one.operation.upper(), another.operation.upper())
    if one.device != another.device:
        first, second = (request.device or "cpu" for request in (one, another))
        return (
            f"Mismatched {kind} CPU/GPU device selection: One rank specified device {first}, but another rank "
            f"specified device {second}."
        )
    if one.about != another.about:
        return f"Mismatched calls: One rank asked to {one.about}, but another rank asked to {another.about}."
    if len(one.shapes) != len(another.shapes):
        return (
            f"Mismatched {kind} groups: One rank sent {len(one.shapes)} tensors,"
            f" but another rank sent {len(another.shapes)} tensors."
        )
    for one_shape, other_shape in zip(one.shapes, another.shapes, strict=True):
        if difference := _difference_of_shapes(one.kind, one_shape, other_shape):
            return f"Mismatched {kind} tensor shapes: {difference}"
    return _describe_options(one, another)


def _describe_options(one: Description, another: Description) -> str:
    kind = one.kind.value
    if (one.prescale, one.postscale) != (another.prescale, another.postscale):
        return (
            "Mismatched prescale and/or postscale factors: One rank sent factors "
            f"({one.prescale:g}, {one.postscale:g}), but another rank sent factors "
            f"({another.prescale:g}, {another.postscale:g})."
        )
    if one.op != another.op:
        return (
            f"Mismatched reduction operation: One rank sent reduction op {one.op}, "
            f"but another rank sent reduction op {another.op}."
        )
    if one.root != another.root:
        return (
            f"Mismatched {kind} root ranks: One rank specified root rank {one.root_rank}, "
            f"but another rank specified root rank {another.root_rank}."
        )
    return f"Mismatched {kind} requests."


_DID = "Mismatched operations: One rank did an {}, but another rank did an {}."


def _difference_of_shapes(kind: Kind, mine: tuple[int, ...], other: tuple[int, ...]) -> str | None:
    if kind in _OF_ONE_SHAPE:
        if mine == other:
            return None
        return f"One rank sent a tensor of shape {list(mine)}, but another rank sent a tensor of shape {list(other)}."
    if len(mine) != len(other):
        return f"One rank sent a tensor of rank {len(mine)}, but another rank sent a tensor of rank {len(other)}."
    for dimension in range(1, len(mine)):
        if mine[dimension] != other[dimension]:
            return (
                f"One rank sent a tensor with dimension {dimension} equal to {mine[dimension]}, but another rank"
                f" sent a tensor with dimension {dimension} equal to {other[dimension]}."
            )
    return None
