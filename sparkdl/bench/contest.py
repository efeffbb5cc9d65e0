"""Measures contenders against each other: in one run, in turn, case by case.

Runs where the benchmark was called. The ranks of all contenders are alive from the beginning to the end, and sleep
while other contenders have their turns. Every contender has several turns at each case, so that a machine that becomes
slower during the run slows down all contenders alike.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.bench.rank_group import Answer, RankGroup

if TYPE_CHECKING:
    from sparkdl.bench.namespaces import Namespace

_PROBE_REPETITIONS = 2
_REPETITION_S = 1e-3
_MAX_OPERATIONS = 64
_MAX_REPETITIONS = 200
_TURN_TIMEOUT_S = 600.0
_MAX_ROUNDS = 50


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
    max_operations: int = _MAX_OPERATIONS


@dataclass(frozen=True, kw_only=True)
class Contest:
    """The contenders, the cases and the duration of a measurement.

    Attributes:
        benchmark: a key of :data:`sparkdl.bench.contenders.rank.TRIALS`.
        world_size: number of ranks of every contender.
        libraries: library that the ranks of each contender open, by contender.
        cases: the cases, in the order in which they are measured.
        seconds: about how long to measure each contender at each case.
        num_rounds: number of turns that each contender has at each case.
        min_repetitions: minimal number of repetitions in each turn, however long they take.
        hosts: the host of each rank; empty for ranks on this machine.
    """

    benchmark: str
    world_size: int
    libraries: Mapping[str, str]
    cases: Sequence[Case]
    seconds: float
    num_rounds: int = 5
    min_repetitions: int = 2
    hosts: Sequence[Namespace] = ()


@dataclass(kw_only=True)
class Measurements:
    """The measurements of one contender at one case.

    Attributes:
        times: seconds per operation on the slowest rank, one entry per repetition.
        results: further results of the ranks: a list of turns, each with one entry per rank.
    """

    times: list[float] = field(default_factory=list)
    results: list[list[dict[str, Any]]] = field(default_factory=list)


def announce(step: str) -> None:
    """Print the next step of a benchmark."""
    print(f"{step} ...", flush=True)


def in_turn(contenders: Sequence[str], turn: int) -> list[str]:
    """Return the contenders in the order of a round: no contender always follows the same one."""
    start = turn % len(contenders)
    return [*contenders[start:], *contenders[:start]]


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


def hold(contest: Contest) -> dict[str, dict[str, Measurements]]:
    """Measure all contenders, and return the measurements by name of the case and contender.

    Raises:
        RankError: if a contender failed; it holds what its rank wrote to standard error.
        CommunicatorTimeoutError: if a contender does not answer.
    """
    with ExitStack() as stack:
        announce(f"starting {contest.world_size} ranks each of {', '.join(contest.libraries)}")
        groups = {
            library: stack.enter_context(RankGroup(library, contest.world_size, hosts=contest.hosts))
            for library in dict.fromkeys(contest.libraries.values())
        }
        for group in groups.values():
            group.wait_until_ready()
        measured = {}
        for case in contest.cases:
            announce(f"measuring {case.name}")
            measured[case.name] = _measure_case(contest, case, groups)
    return measured


def _measure_case(contest: Contest, case: Case, groups: Mapping[str, RankGroup]) -> dict[str, Measurements]:
    def take_turn(contender: str, repetitions: int, operations: int) -> list[Answer]:
        turn = {
            "benchmark": contest.benchmark,
            "contender": contender,
            "case": dict(case.settings),
            "repetitions": repetitions,
            "operations": operations,
        }
        return groups[contest.libraries[contender]].take_turn(turn, timeout_s=_TURN_TIMEOUT_S)

    plans = {}
    for contender in contest.libraries:
        operation_s = min(_slowest(take_turn(contender, _PROBE_REPETITIONS, 1)))
        plans[contender] = _plan(contest, case, operation_s)
    measured = {contender: Measurements() for contender in contest.libraries}
    for turn in range(contest.num_rounds):
        for contender in in_turn(list(contest.libraries), turn):
            repetitions, operations = plans[contender]
            answers = take_turn(contender, repetitions, operations)
            measured[contender].times += _slowest(answers)
            measured[contender].results.append([answer["result"] for answer in answers])
    return measured


def _plan(contest: Contest, case: Case, operation_s: float) -> tuple[int, int]:
    """Return the number of repetitions of a turn and of operations per repetition."""
    operations = int(min(case.max_operations, max(1, _REPETITION_S / operation_s)))
    repetitions = int(contest.seconds / contest.num_rounds / (operations * operation_s))
    return min(_MAX_REPETITIONS, max(contest.min_repetitions, repetitions)), operations


def _slowest(answers: Sequence[Answer]) -> list[float]:
    return [max(times) for times in zip(*(answer["times"] for answer in answers), strict=True)]
