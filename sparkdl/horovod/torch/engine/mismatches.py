"""What is said when ranks asked for different things under one name: Horovod's sentence, and who said what."""

from __future__ import annotations

from collections.abc import Mapping

from sparkdl.horovod.torch.engine.description import Description, Kind

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
    """Say how the requests that ranks made under one name differ; None if they can run together.

    Args:
        requests: the description by rank.
    """
    (_, first), *others = sorted(requests.items())
    for _, other in others:
        if first.label != other.label:
            said = "; ".join(f"rank {rank}: {request.label}" for rank, request in sorted(requests.items()))
            return f"{_describe(first, other)} ({said})"
    return None


def refuse_join(kind: Kind, joined: list[int]) -> str | None:
    """Say that a kind of request cannot run while ranks have joined; None if it can."""
    if not joined or kind not in _WITHOUT_JOIN:
        return None
    return f"{_WITHOUT_JOIN[kind]} (joined: {', '.join(f'rank {rank}' for rank in joined)})"


def _describe(one: Description, another: Description) -> str:
    kind = one.kind.value
    if one.name != another.name:
        return _operations(one, another)
    for say in (_dtypes, _kinds, _abouts, _counts, _shapes, _scales, _ops, _roots):
        sentence = say(one, another)
        if sentence is not None:
            return sentence
    return f"Mismatched {kind} requests."


def _dtypes(one: Description, another: Description) -> str | None:
    for mine, other in zip(one.dtypes, another.dtypes, strict=False):
        if mine != other:
            return f"Mismatched data types: One rank had type {mine}, but another rank had type {other}."
    return None


def _operations(one: Description, another: Description) -> str:
    by_kind = _kinds(one, another)
    if by_kind is not None:
        return by_kind
    return _did(one.operation.upper(), another.operation.upper())


def _kinds(one: Description, another: Description) -> str | None:
    if one.kind == another.kind:
        return None
    return _did(one.kind.value, another.kind.value)


def _did(mine: str, other: str) -> str:
    return f"Mismatched operations: One rank did an {mine}, but another rank did an {other}."


def _abouts(one: Description, another: Description) -> str | None:
    if one.about == another.about:
        return None
    return f"Mismatched calls: One rank asked to {one.about}, but another rank asked to {another.about}."


def _counts(one: Description, another: Description) -> str | None:
    if len(one.shapes) == len(another.shapes):
        return None
    return (
        f"Mismatched {one.kind.value} groups: One rank sent {len(one.shapes)} tensors,"
        f" but another rank sent {len(another.shapes)} tensors."
    )


def _shapes(one: Description, another: Description) -> str | None:
    say = _whole_shape if one.kind in _OF_ONE_SHAPE else _shape_of_rows
    for mine, other in zip(one.shapes, another.shapes, strict=False):
        sentence = say(mine, other)
        if sentence is not None:
            return f"Mismatched {one.kind.value} tensor shapes: {sentence}"
    return None


def _whole_shape(mine: tuple[int, ...], other: tuple[int, ...]) -> str | None:
    if mine == other:
        return None
    return f"One rank sent a tensor of shape {list(mine)}, but another rank sent a tensor of shape {list(other)}."


def _shape_of_rows(mine: tuple[int, ...], other: tuple[int, ...]) -> str | None:
    if len(mine) != len(other):
        return f"One rank sent a tensor of rank {len(mine)}, but another rank sent a tensor of rank {len(other)}."
    for dimension in range(1, len(mine)):
        if mine[dimension] != other[dimension]:
            return (
                f"One rank sent a tensor with dimension {dimension} equal to {mine[dimension]}, but another rank"
                f" sent a tensor with dimension {dimension} equal to {other[dimension]}."
            )
    return None


def _scales(one: Description, another: Description) -> str | None:
    if (one.prescale, one.postscale) == (another.prescale, another.postscale):
        return None
    return (
        "Mismatched prescale and/or postscale factors: One rank sent factors "
        f"({one.prescale:g}, {one.postscale:g}), but another rank sent factors "
        f"({another.prescale:g}, {another.postscale:g})."
    )


def _ops(one: Description, another: Description) -> str | None:
    if one.op == another.op:
        return None
    return (
        f"Mismatched reduction operation: One rank sent reduction op {one.op}, "
        f"but another rank sent reduction op {another.op}."
    )


def _roots(one: Description, another: Description) -> str | None:
    if one.root == another.root:
        return None
    return (
        f"Mismatched {one.kind.value} root ranks: One rank specified root rank {one.root_rank}, "
        f"but another rank specified root rank {another.root_rank}."
    )
