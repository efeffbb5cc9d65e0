"""What a rank says of an operation before it takes part, so that the ranks find out whether they mean the same.

The words are those of the native core. Nothing here communicates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from sparkdl.collective.flat_buffers import item_bytes
from sparkdl.errors import MismatchError, ParamError
from sparkdl.topology import name_ranks

MODULUS = 2**64
"""Digests and balances are numbers below this, and added modulo this."""

JOIN = "join"
"""The kind of a rank that has no more data."""

_WITHOUT_JOINED = ("allreduce", "reduce_scatter", "allgather", "barrier")
"""What ranks can do while others have joined, as far as their blocks are equal."""

_OF_BLOCKS = ("reduce_scatter", "allgather", "gather", "scatter")
"""Whose size is that of one rank's block."""

_SHOWN = 32
"""How many sizes of a long list a message shows."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One operation as one rank means it.

    Attributes:
        kind: the method's name.
        name: what the user calls it.
        dtype: of the elements.
        size: elements of the array, of all arrays of a group, or of one rank's block.
        shape: of a named array that has more than one dimension; of rows, where the ranks have blocks.
        arrays: elements of each array of a group.
        blocks: elements of each rank's block, where they differ.
        array_blocks: elements of each rank's block of each array of a group of arrays with blocks.
        op: how to reduce.
        prescale: factor of what goes in.
        postscale: factor of what comes out.
        root: the rank that gives or gets.
        sends: elements for each rank, in an alltoall.
        receives: elements from each rank, in an alltoall.
        joined_at: number of the operation at which the rank joined, for :data:`JOIN`.
    """

    kind: str
    name: str = ""
    dtype: str = ""
    size: int = 0
    shape: tuple[int, ...] = ()
    arrays: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    array_blocks: tuple[tuple[int, ...], ...] = ()
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    joined_at: int = -1

    def __str__(self) -> str:
        """The operation in words: ``allreduce 'grad' of 10 float32 by sum``."""
        text = f"{self.kind} {self.name!r}" if self.name else self.kind
        if self.arrays:
            text += f" of {self.size} {self.dtype} in arrays of {_list(self.arrays)}"
        elif self.sends and len({*self.sends, *self.receives}) > 1:
            text += f" of {self.dtype} in blocks of {_list(self.sends)} for blocks of {_list(self.receives)}"
        elif self.array_blocks:
            size = "" if self.blocks else f"{self.size} "
            arrays = ", ".join(f"({_list(blocks)})" for blocks in self.array_blocks[:_SHOWN])
            text += f" of {size}{self.dtype} in arrays of blocks {arrays}"
        elif self.blocks:
            text += f" of {self.dtype} in blocks of {_list(self.blocks)}"
        elif self.dtype:
            text += f" of {self.size} {self.dtype}"
        if self.shape:
            text += f" {'in rows of' if self.kind in _OF_BLOCKS else 'of shape'} ({_list(self.shape)})"
        if self.op:
            text += f" by {self.op}"
        if self.prescale != 1.0:
            text += f", prescale {self.prescale:g}"
        if self.postscale != 1.0:
            text += f", postscale {self.postscale:g}"
        if self.root >= 0:
            text += f" {'to' if self.kind in ('reduce', 'gather') else 'from'} rank {self.root}"
        return text

    @property
    def digest(self) -> int:
        """64 bits that differ where ranks disagree. What each rank of an alltoall sends is not part of it."""
        return _digest(replace(self, sends=(), receives=()) if self.sends else self)

    def num_bytes(self, world_size: int) -> int:
        """Bytes of the array, or of the blocks of all ranks together."""
        if not self.dtype:
            return 0
        elements = sum(self.sends or self.blocks) or self.size * (
            world_size if self.kind in _OF_BLOCKS else 1
        )
        return elements * item_bytes(self.dtype)

    def balance(self, rank: int) -> int:
        """64 bits whose sum over all ranks is zero, modulo 2**64, if each receives what the others send to it."""
        if not self.sends:
            return 0
        world_size = len(self.sends)
        others = np.arange(world_size, dtype=np.uint64)
        sent = _mix(others + np.uint64(rank * world_size), self.sends)
        received = _mix(others * np.uint64(world_size) + np.uint64(rank), self.receives)
        return (int(sent.sum()) - int(received.sum())) % MODULUS

    def to_bytes(self) -> bytes:
        """Encode for other ranks."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Claim:
        """Decode what :meth:`to_bytes` made."""
        values: dict[str, Any] = json.loads(data)
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(tuple(each) if isinstance(each, list) else each for each in value)
        return cls(**values)


def agree(claims: Sequence[Claim], number: int) -> Claim:
    """Find what all ranks that have not joined say; a joined rank's own claim if all have.

    Args:
        claims: of all ranks, in order of rank.
        number: of the operation, for the message.

    Raises:
        MismatchError: if they disagree, or say what cannot be done while others have joined.
    """
    active = [claim for claim in claims if claim.kind != JOIN]
    if not active:
        return claims[0]
    agreed = active[0]
    is_possible = len(active) == len(claims) or (agreed.kind in _WITHOUT_JOINED and not agreed.blocks)
    if not is_possible or any(claim.digest != agreed.digest for claim in active):
        said: dict[str, list[int]] = {}
        for rank, claim in enumerate(claims):
            said.setdefault(str(claim), []).append(rank)
        who_said_what = "; ".join(f"{name_ranks(ranks)} said {text}" for text, ranks in said.items())
        raise MismatchError(f"the ranks disagree about operation {number}: {who_said_what}")
    if agreed.sends:
        _check_exchange(claims)
    return agreed


def last_joined(claims: Sequence[Claim]) -> int:
    """The rank that joined last, the highest if there were several."""
    return max(range(len(claims)), key=lambda rank: (claims[rank].joined_at, rank))


def check_counts(counts: Sequence[int], world_size: int, what: str) -> tuple[int, ...]:
    """The elements of each rank's block as plain numbers.

    Raises:
        ParamError: if there is not one for each rank, or one is negative.
    """
    plain = tuple(int(count) for count in counts)
    if len(plain) != world_size or min(plain) < 0:
        raise ParamError(
            f"{what} [{_list(plain)}] are not the sizes of {world_size} blocks, one for each rank"
        )
    return plain


def _check_exchange(claims: Sequence[Claim]) -> None:
    for source, claim in enumerate(claims):
        for to, sent in enumerate(claim.sends):
            expected = claims[to].receives[source]
            if sent != expected:
                raise MismatchError(
                    f"the ranks disagree about {claim.kind}{f' {claim.name!r}' * bool(claim.name)}: rank {source}"
                    f" sends {sent} elements to rank {to}, which expects {expected}"
                )


def _list(counts: Sequence[int]) -> str:
    shown = ", ".join(map(str, counts[:_SHOWN]))
    return (
        shown if len(counts) <= _SHOWN else f"{shown}, and {len(counts) - _SHOWN} more, {sum(counts)} in all"
    )


# Training repeats a few operations for ever.
@lru_cache(maxsize=4096)
def _digest(claim: Claim) -> int:
    said = repr([getattr(claim, field.name) for field in fields(claim)])
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "little")


def _mix(keys: np.ndarray[Any, Any], counts: Sequence[int]) -> np.ndarray[Any, Any]:
    """Spread pairs of key and count over 64 bits, by splitmix64 (https://doi.org/10.1145/2660193.2660195)."""
    bits = keys * np.uint64(0x9E3779B97F4A7C15) + np.array(counts, np.uint64) * np.uint64(0xD1342543DE82EF95)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits ^ (bits >> np.uint64(31)))
