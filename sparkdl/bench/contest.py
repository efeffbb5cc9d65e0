"""Measures contenders against each other: in one run, in turn, case by case.

Runs where the benchmark was called. The ranks of all contenders are alive from the beginning to the end, and sleep
while other contenders have their turns. Every contender has several turns at each case, so that a machine that becomes
slower during the run slows down all contenders alike.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sparkdl.bench.rank_group import Answer, RankGroup
from sparkdl.bench.report import row_of
from sparkdl.errors import CommunicatorError

if TYPE_CHECKING:
    from sparkdl.bench.namespaces import Namespace

_PROBE_REPETITIONS = 2
_REPETITION_S = 1e-3
MAX_OPERATIONS = 64
_MAX_REPETITIONS = 200
TURN_TIMEOUT_S = 600.0
_MAX_ROUNDS = 50

Contender = TypeVar("Contender", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Case:
    """The task that all contenders measure.

    Attributes:
        name: name of the case in reports.
        settings: arguments from which the trial on the ranks is made, as JSON can hold them.
        max_operations: maximal number of operations per repetition, which has fewer if operations are slow.
    """

    name: str
    settings: Mapping[str, Any]
    max_operations: int = MAX_OPERATIONS


@dataclass(kw_only=True)
class Measurements:
    """The measurements of one contender at one case.

    Attributes:
        times: seconds per operation on the slowest rank, one entry per repetition.
        results: further results of the ranks: a list of turns, each with one entry per rank.
    """

    times: list[float] = field(default_factory=list)
    results: list[list[dict[str, Any]]] = field(default_factory=list)

    def check_alike(self, name: str) -> None:
        """Check that all ranks had the same ``checksum`` of their parameters after each turn.

        Raises:
            CommunicatorError: if they had not; the message begins with ``name``.
        """
        for results in self.results:
            sums = [result["checksum"] for result in results]
            if len(set(sums)) > 1:
                raise CommunicatorError(f"{name}: the ranks ended with different parameters, of sums {sums}.")


def announce(step: str) -> None:
    """Print the next step of a benchmark."""
    print(f"{step} ...", flush=True)


def in_turn(contenders: Sequence[Contender], turn: int) -> list[Contender]:
    """Return the contenders in the order of a round: no contender always follows the same one."""
    start = turn % len(contenders)
    return [*contenders[start:], *contenders[:start]]


def rows_of(
    cases: Iterable[Case], measured: Mapping[str, Mapping[str, Measurements]]
) -> Iterator[tuple[Case, Measurements, dict[str, Any]]]:
    """Yield each case with the measurements of each contender, and the part of its row that all benchmarks have."""
    for case in cases:
        times = {name: measurements.times for name, measurements in measured[case.name].items()}
        for name, measurements in measured[case.name].items():
            yield case, measurements, row_of(case.name, name, times)


def take_turns(
    actions: Mapping[str, Callable[[], None]], seconds: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Run the actions in turn, for about ``seconds`` each, after a warm-up.

    Returns:
        The seconds of every run, and the processor time of this process and its descendants during it, by action.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    spent: dict[str, list[float]] = {name: [] for name in actions}
    for index in range(_MAX_ROUNDS + 1):
        for name in in_turn(list(actions), index):
            begin_processor_s, begin = _processor_s(), time.perf_counter()
            actions[name]()
            if index:
                times[name].append(time.perf_counter() - begin)
                spent[name].append(_processor_s() - begin_processor_s)
        if index and sum(map(sum, times.values())) >= seconds * len(actions):
            break
    return times, spent


def _processor_s() -> float:
    """Processor time of this process, its descendants, and those of them that have ended."""
    children: dict[int, list[int]] = {}
    ticks = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            process = int(path.parent.name)
            children.setdefault(int(fields[1]), []).append(process)
            ticks[process] = sum(map(int, fields[11:15]))  # with children that it has waited for
    tree = [os.getpid()]
    for process in tree:
        tree += children.get(process, [])
    return sum(ticks.get(process, 0) for process in tree) / os.sysconf("SC_CLK_TCK")


def hold(
    benchmark: str,
    *,
    world_size: int,
    libraries: Mapping[str, str],
    cases: Sequence[Case],
    seconds: float,
    num_rounds: int = 5,
    min_repetitions: int = 2,
    hosts: Sequence[Namespace] = (),
) -> dict[str, dict[str, Measurements]]:
    """Measure all contenders, and return the measurements by name of the case and contender.

    Args:
        benchmark: a key of :data:`sparkdl.bench.contenders.rank.TRIALS`.
        world_size: number of ranks of every contender.
        libraries: library that the ranks of each contender open, by contender.
        cases: the cases, in the order in which they are measured.
        seconds: about how long to measure each contender at each case.
        num_rounds: number of turns that each contender has at each case.
        min_repetitions: minimal number of repetitions in each turn, however long they take.
        hosts: the host of each rank; empty for ranks on this machine.

    Raises:
        RankError: if a contender failed; it holds what its rank wrote to standard error.
        CommunicatorTimeoutError: if a contender does not answer.
    """

    def take_turn(
        settings: Mapping[str, Any], contender: str, repetitions: int, operations: int
    ) -> list[Answer]:
        turn = {
            "benchmark": benchmark,
            "contender": contender,
            "case": dict(settings),
            "repetitions": repetitions,
            "operations": operations,
        }
        return groups[libraries[contender]].take_turn(turn, timeout_s=TURN_TIMEOUT_S)

    with ExitStack() as stack:
        announce(f"starting {world_size} ranks each of {', '.join(libraries)}")
        groups = {
            library: stack.enter_context(RankGroup(library, world_size, hosts=hosts))
            for library in dict.fromkeys(libraries.values())
        }
        for group in groups.values():
            group.wait_until_ready()
        measured = {}
        for case in cases:
            announce(f"measuring {case.name}")
            measured[case.name] = measure_in_turn(
                list(libraries),
                partial(take_turn, case.settings),
                seconds=seconds,
                num_rounds=num_rounds,
                min_repetitions=min_repetitions,
                max_operations=case.max_operations,
            )
    return measured


def measure_in_turn(
    contenders: Sequence[Contender],
    take_turn: Callable[[Contender, int, int], list[Answer]],
    *,
    seconds: float,
    num_rounds: int,
    min_repetitions: int,
    max_operations: int,
) -> dict[Contender, Measurements]:
    """Have contenders measure a case in turn, after a first turn that tells how long an operation takes.

    Args:
        contenders: the contenders.
        take_turn: function that has a contender take a turn: so many repetitions, of so many operations each.
        seconds: about how long to measure each contender.
        num_rounds: number of turns of each contender.
        min_repetitions: minimal number of repetitions in each turn, however long they take.
        max_operations: maximal number of operations per repetition.
    """
    plans = {}
    for contender in contenders:
        operation_s = min(_slowest(take_turn(contender, _PROBE_REPETITIONS, 1)))
        operations = int(min(max_operations, max(1, _REPETITION_S / operation_s)))
        repetitions = int(seconds / num_rounds / (operations * operation_s))
        plans[contender] = min(_MAX_REPETITIONS, max(min_repetitions, repetitions)), operations
    measured = {contender: Measurements() for contender in contenders}
    for turn in range(num_rounds):
        for contender in in_turn(contenders, turn):
            answers = take_turn(contender, *plans[contender])
            measured[contender].times += _slowest(answers)
            measured[contender].results.append([answer["result"] for answer in answers])
    return measured


def _slowest(answers: Sequence[Answer]) -> list[float]:
    return [max(times) for times in zip(*(answer["times"] for answer in answers), strict=True)]
