"""Random programs: which ranks call which operations, in which order, and concurrently in which process sets.

``random`` may be a generator of hypothesis, which then searches for the smallest program that fails, or a plain one.
The simplest choice always comes first, as hypothesis prefers it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from hypothesis import strategies

from tests.collective.checks.element_types import DTYPES, SMALL, SPECIAL, WIDE

if TYPE_CHECKING:
    from random import Random

OPS = ("sum", "avg", "min", "max", "product")
REDUCING = ("allreduce", "allreduce_group", "reduce", "reduce_scatter", "reduce_scatter_group")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
IN_PLACE = ("allreduce", "reduce", "broadcast")
BLOCKS = ("reduce_scatter", "allgather", "gather", "scatter")
GROUPS_OF_BLOCKS = ("reduce_scatter_group", "allgather_group")
KINDS = ("barrier", *IN_PLACE, "allreduce_group", *BLOCKS, *GROUPS_OF_BLOCKS, "alltoall", "messages")

SIZES = (0, 1, 2, 3, 17, 64, 1000, 5000, 16_384, 40_000)
LARGE_SIZES = (131_072, 300_001)
SCALES = (1.0, 2.0, 0.5, -1.0, 0.3, 3.0)


@dataclass(frozen=True)
class _Shown:
    """A dataclass whose repr shows only fields that differ from their defaults, to keep failing programs readable."""

    def __repr__(self) -> str:
        told = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(told)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # hypothesis prints this
        printer.text(repr(self))


@dataclass(frozen=True, repr=False)
class Operation(_Shown):
    """One operation, the same on all ranks.

    Attributes:
        kind: name of the communicator's method, or ``"messages"``: every rank sends one and receives one.
        sizes: numbers of elements. In an ``allreduce_group`` of each array; for operations with blocks of each rank's
            block, array by array; in an ``alltoall`` of the part for every other rank, rank by rank; for messages of
            each rank's message; otherwise of the array.
        num_arrays: number of arrays in a group of arrays with blocks.
        uneven: whether ``counts`` are given.
        in_place: whether a rank's block is a part of the array of all ranks.
        misaligned: whether the arrays begin at odd addresses.
        strided: whether there are gaps between their elements.
        shift: distance from a rank to the rank that receives its message.
        tag: tag of the messages.
        numbers: kind of numbers that the arrays hold; see ``element_types``.
        seed: seed of the numbers.
    """

    kind: str = "barrier"
    dtype: str = "uint8"
    sizes: tuple[int, ...] = ()
    num_arrays: int = 1
    uneven: bool = False
    op: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    name: str = ""
    shape: tuple[int, ...] | None = None
    in_place: bool = False
    misaligned: bool = False
    strided: bool = False
    shift: int = 1
    tag: int = 0
    numbers: str = SMALL
    seed: int = 0

    @property
    def has_uneven_blocks(self) -> bool:
        """Whether the blocks of the ranks differ; with ``counts`` they may still be equal."""
        if self.kind in GROUPS_OF_BLOCKS:
            return len({sum(sizes) for sizes in zip(*self.array_sizes, strict=True)}) > 1
        return self.kind in BLOCKS and len(set(self.sizes)) > 1

    @property
    def array_sizes(self) -> list[tuple[int, ...]]:
        """Number of elements of each rank's block, by array."""
        world_size = len(self.sizes) // self.num_arrays
        return [
            self.sizes[start : start + world_size] for start in range(0, len(self.sizes), world_size or 1)
        ]


@dataclass(frozen=True, repr=False)
class Step(_Shown):
    """An operation, and how the ranks call it.

    Attributes:
        asynchronous: ranks that call the asynchronous form.
        in_arena: ranks whose arrays are in the communicator's arena.
        dropped: ranks that drop the handle.
        odd_rank: rank that runs ``instead``, which does not match the operation of the others; None without one.
    """

    operation: Operation = Operation()
    asynchronous: tuple[int, ...] = ()
    in_arena: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    odd_rank: int | None = None
    instead: Operation = Operation()

    def operation_of(self, rank: int) -> Operation:
        """The operation of a rank."""
        return self.instead if rank == self.odd_rank else self.operation


@dataclass(frozen=True, repr=False)
class Strand(_Shown):
    """The consecutive steps of the members of one communicator.

    Attributes:
        ranks: members of the process set in its order; None for the communicator of all ranks.
        joins: number of steps after which each rank joins; None if none does.
        waits_backwards: whether handles are waited for from the last to the first.
    """

    ranks: tuple[int, ...] | None = None
    steps: tuple[Step, ...] = ()
    joins: tuple[int, ...] | None = None
    waits_backwards: bool = False


Program = tuple[Strand, ...]
"""Concurrent strands, each in its own thread; at most one of them uses the communicator of all ranks."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The operations that programs may contain."""

    sizes: tuple[int, ...] = SIZES + LARGE_SIZES
    numbers: tuple[str, ...] = (SMALL, WIDE, SPECIAL)
    most_steps: int = 8
    most_process_sets: int = 3


@strategies.composite
def programs(draw: Any, world_size: int, scope: Scope) -> Program:
    """Hypothesis strategy for programs of ``world_size`` ranks."""
    return draw_program(draw(strategies.randoms(use_true_random=False)), world_size, scope)


def draw_program(random: Random, world_size: int, scope: Scope) -> Program:
    """Draw a program for ``world_size`` ranks."""
    num_sets = _rarely(random, 0, lambda: random.randint(1, scope.most_process_sets))
    strands = []
    if num_sets == 0 or random.randint(0, 3):
        strands.append(_draw_strand(random, None, world_size, scope))
    for _ in range(num_sets):
        ranks = tuple(random.sample(range(world_size), random.randint(1, world_size)))
        strands.append(_draw_strand(random, ranks, len(ranks), scope))
    return tuple(strands)


def _draw_strand(random: Random, ranks: tuple[int, ...] | None, world_size: int, scope: Scope) -> Strand:
    steps = tuple(draw_step(random, world_size, scope) for _ in range(random.randint(1, scope.most_steps)))
    joins = None
    # A rank that has joined neither sends nor receives messages.
    if all(step.operation.kind != "messages" for step in steps):
        joins = _rarely(
            random, None, lambda: tuple(random.randint(0, len(steps)) for _ in range(world_size)), one_in=6
        )
    return Strand(ranks=ranks, steps=steps, joins=joins, waits_backwards=random.randint(0, 3) == 3)


def draw_step(random: Random, world_size: int, scope: Scope) -> Step:
    """Draw a step for ``world_size`` ranks; occasionally one of them runs a mismatched operation."""
    operation = draw_operation(random, world_size, scope)
    step = Step(
        operation=operation,
        asynchronous=_some_ranks(random, world_size),
        in_arena=_some_ranks(random, world_size) if operation.kind.startswith("allreduce") else (),
        # No later operation shows when a message has arrived.
        dropped=_rarely(random, (), lambda: _some_ranks(random, world_size), one_in=4)
        if operation.kind != "messages"
        else (),
    )
    if world_size == 1 or random.randint(0, 9) < 9:
        return step
    odd_rank = random.randrange(world_size)
    instead = draw_other_operation(random, step.operation, odd_rank, world_size, scope)
    return replace(step, odd_rank=odd_rank, instead=instead)


def draw_operation(random: Random, world_size: int, scope: Scope) -> Operation:
    """Draw an operation for ``world_size`` ranks."""
    kind = random.choice(KINDS if world_size > 1 else KINDS[:-1])
    if kind == "barrier":
        return Operation(kind, name=_draw_name(random))
    dtype = random.choice(DTYPES)
    uneven = kind in (*BLOCKS, *GROUPS_OF_BLOCKS, "alltoall") and random.randint(0, 1) == 1
    num_arrays = random.randint(1, 5) if kind in GROUPS_OF_BLOCKS else 1
    sizes = sum((_draw_sizes(random, kind, world_size, uneven, scope) for _ in range(num_arrays)), ())
    reduces = kind in REDUCING
    return Operation(
        kind,
        dtype=dtype,
        sizes=sizes,
        num_arrays=num_arrays,
        uneven=uneven,
        # bool has no average.
        op=random.choice([op for op in OPS if op != "avg" or dtype != "bool"]) if reduces else "sum",
        prescale=_draw_scale(random) if reduces else 1.0,
        postscale=_draw_scale(random) if reduces else 1.0,
        root=random.randrange(world_size) if kind in ROOTED else 0,
        name=_draw_name(random) if kind != "messages" else "",
        shape=_draw_shape(random, sizes[0]) if kind in IN_PLACE else None,
        in_place=kind in ("allgather", "reduce_scatter", *GROUPS_OF_BLOCKS) and random.randint(0, 3) == 3,
        misaligned=random.randint(0, 7) == 7,
        strided=random.randint(0, 7) == 7,
        shift=random.randint(1, world_size - 1) if kind == "messages" else 1,
        tag=random.choice((0, 1, 77)) if kind == "messages" else 0,
        numbers=random.choice(scope.numbers),
        seed=random.randrange(1 << 16),
    )


def draw_other_operation(
    random: Random, operation: Operation, odd_rank: int, world_size: int, scope: Scope
) -> Operation:
    """Draw an operation that mismatches ``operation`` when ``odd_rank`` calls it."""
    ways = ["kind", "name"] if operation.kind != "messages" else []
    if operation.kind != "barrier":
        ways.append("dtype")
        ways.append("sizes")
    if operation.kind in REDUCING:
        ways += ["op", "prescale", "postscale"]
    if operation.kind in ROOTED:
        ways.append("root")
    way = random.choice(ways)
    if way == "kind":
        while (other := draw_operation(random, world_size, scope)).kind in (operation.kind, "messages"):
            pass
        return other
    if way == "sizes":
        return replace(operation, sizes=_other_sizes(operation, odd_rank, world_size), shape=None)
    values: dict[str, tuple[Any, ...]] = {
        "name": ("", "other", "weights"),
        "dtype": tuple(dtype for dtype in DTYPES if dtype != "bool" or operation.op != "avg"),
        "op": tuple(op for op in OPS if op != "avg" or operation.dtype != "bool"),
        "prescale": SCALES,
        "postscale": SCALES,
        "root": tuple(range(world_size)),
    }
    others = [value for value in values[way] if value != getattr(operation, way)]
    return replace(operation, **{way: random.choice(others)})


def _other_sizes(operation: Operation, odd_rank: int, world_size: int) -> tuple[int, ...]:
    sizes = list(operation.sizes)
    if operation.kind == "alltoall" and operation.uneven:
        # The size of a message to a neighbour; the neighbour would not notice any other change.
        sizes[odd_rank * world_size + (odd_rank + 1) % world_size] += 1
    elif operation.kind == "messages":
        sizes[odd_rank] += 1
    elif operation.uneven or operation.kind == "allreduce_group":
        sizes[-1] += 1
    else:
        sizes = [size + 1 for size in sizes]
    return tuple(sizes)


def _draw_sizes(random: Random, kind: str, world_size: int, uneven: bool, scope: Scope) -> tuple[int, ...]:
    if kind == "allreduce_group":
        most = min(random.choice(scope.sizes), 40_000)
        return tuple(random.randint(0, most) for _ in range(random.randint(1, 9)))
    size = random.choice(scope.sizes)
    if kind not in (*BLOCKS, *GROUPS_OF_BLOCKS, "alltoall", "messages"):
        return (size,)
    size = size if size < 10 else size // world_size
    num_blocks = world_size * world_size if kind == "alltoall" else world_size
    if not uneven and kind != "messages":
        return (size,) * num_blocks
    return tuple(random.choice((size, 0, 1, 5, size // 3)) for _ in range(num_blocks))


def _draw_shape(random: Random, size: int) -> tuple[int, ...] | None:
    shapes = [None, (1, size), (size, 1)]
    if size == 1:
        shapes.append(())
    if size % 2 == 0:
        shapes.append((2, size // 2))
    return random.choice(shapes)


def _draw_scale(random: Random) -> float:
    return _rarely(random, 1.0, lambda: random.choice(SCALES), one_in=4)


def _draw_name(random: Random) -> str:
    return random.choice(("", "weights", "größe/β"))


def _some_ranks(random: Random, world_size: int) -> tuple[int, ...]:
    chosen = random.randint(0, (1 << world_size) - 1) if random.randint(0, 1) else 0
    return tuple(rank for rank in range(world_size) if chosen >> rank & 1)


def _rarely(random: Random, usual: Any, draw: Any, one_in: int = 3) -> Any:
    return draw() if random.randint(1, one_in) == one_in else usual
