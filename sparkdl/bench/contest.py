"""Contenders measured against each other: in one run, in turn, case after case.

Runs where the benchmark was called. All contenders' ranks are alive from the beginning to the end, and sleep while
others have their turns. Every contender has several turns at each case, so that a machine that gets slower in
between meets them all alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from sparkdl.bench.rank_group import Answer, RankGroup

_PROBE_REPETITIONS = 2
_REPETITION_S = 1e-3
_MAX_OPERATIONS = 64
_MAX_REPETITIONS = 200
_TURN_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """What all contenders do.

    Attributes:
        name: in reports.
        settings: what the ranks' trial makes it from, in JSON's terms.
        max_operations: how many operations a repetition has at most; it has fewer where they take long.
    """

    name: str
    settings: Mapping[str, Any]
    max_operations: int = _MAX_OPERATIONS


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Contenders, cases, and time of a measurement.

    Attributes:
        benchmark: a key of :data:`sparkdl.bench.contenders.rank.TRIALS`.
        world_size: how many ranks every contender has.
        libraries: the contenders, and for each the library that its ranks open.
        cases: in order.
        seconds: how long to measure each contender at each case, about.
        num_rounds: in how many turns.
        min_repetitions: how often to measure however long it takes, in each turn.
    """

    benchmark: str
    world_size: int
    libraries: Mapping[str, str]
    cases: Sequence[Case]
    seconds: float
    num_rounds: int = 5
    min_repetitions: int = 2


@dataclass(kw_only=True)
class Measured:
    """One contender at one case.

    Attributes:
        times: seconds of an operation, one per repetition: the slowest rank's.
        results: what the ranks said besides, turn by turn.
    """

    times: list[float] = field(default_factory=list)
    results: list[list[dict[str, Any]]] = field(default_factory=list)


def hold(contest: Contest, *, announce: Callable[[str], None]) -> dict[str, dict[str, Measured]]:
    """Measure; the result is by the case's name and the contender's.

    Args:
        contest: what to measure.
        announce: called with a line on each step.

    Raises:
        RankError: if a contender failed; it holds what its rank wrote to standard error.
        CommunicatorTimeoutError: if a contender does not answer.
    """
    with ExitStack() as stack:
        announce(f"starting {contest.world_size} ranks each of {', '.join(contest.libraries)}")
        groups = {
            library: stack.enter_context(RankGroup(library, contest.world_size))
            for library in dict.fromkeys(contest.libraries.values())
        }
        for group in groups.values():
            group.wait_until_ready()
        measured = {}
        for case in contest.cases:
            announce(f"measuring {case.name}")
            measured[case.name] = _measure_case(contest, case, groups)
    return measured


def _measure_case(contest: Contest, case: Case, groups: Mapping[str, RankGroup]) -> dict[str, Measured]:
    plans = {contender: _plan(contest, case, contender, groups) for contender in contest.libraries}
    measured = {contender: Measured() for contender in contest.libraries}
    contenders = list(contest.libraries)
    for index in range(contest.num_rounds):
        # No contender always follows the same one.
        start = index % len(contenders)
        for contender in contenders[start:] + contenders[:start]:
            repetitions, operations = plans[contender]
            answers = _take_turn(contest, case, contender, groups, repetitions, operations)
            measured[contender].times += _slowest(answers)
            measured[contender].results.append([answer["result"] for answer in answers])
    return measured


def _plan(contest: Contest, case: Case, contender: str, groups: Mapping[str, RankGroup]) -> tuple[int, int]:
    """How many repetitions a turn takes, of how many operations each; tried out."""
    duration_s = min(_slowest(_take_turn(contest, case, contender, groups, _PROBE_REPETITIONS, 1)))
    operations = int(min(case.max_operations, max(1, _REPETITION_S / duration_s)))
    repetitions = int(contest.seconds / contest.num_rounds / (operations * duration_s))
    return min(_MAX_REPETITIONS, max(contest.min_repetitions, repetitions)), operations


def _take_turn(
    contest: Contest,
    case: Case,
    contender: str,
    groups: Mapping[str, RankGroup],
    repetitions: int,
    operations: int,
) -> list[Answer]:
    turn = {
        "benchmark": contest.benchmark,
        "contender": contender,
        "case": dict(case.settings),
        "repetitions": repetitions,
        "operations": operations,
    }
    return groups[contest.libraries[contender]].take_turn(turn, timeout_s=_TURN_TIMEOUT_S)


def _slowest(answers: Sequence[Answer]) -> list[float]:
    return [max(times) for times in zip(*(answer["times"] for answer in answers), strict=True)]
