"""``sparkdl bench link``: the time of a training step on two hosts with a slow link, by how the ranks use it.

Runs where it is called, as root: the hosts are network namespaces of this machine, with a cable whose rate is limited.
Each has one rank with one thread. ``alone`` trains without any communication, which is the speed without a link.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from sparkdl.bench.contenders.link import MODELS
from sparkdl.bench.contest import Measurements, announce
from sparkdl.bench.libraries import names_of, require
from sparkdl.bench.namespaces import Namespace, limited_hosts, why_impossible
from sparkdl.bench.options import add_common_arguments, check_common_arguments, parse_rates
from sparkdl.bench.rank_group import RankGroup
from sparkdl.bench.report import Columns, row_of, show, time_of
from sparkdl.errors import ParamError
from sparkdl.slow_links import DiLoCo, LocalSGD, PowerSGD, TopK, as_dict

_TURN_TIMEOUT_S = 1800.0
_MAX_STEPS = 8
"""Most steps of a round of contenders whose steps are all alike."""

_LEGEND = (
    "speed: as a share of the speed of ranks that do not communicate, by medians, and by the fastest round of\n"
    "each, which other work on the machine disturbs least."
)


@dataclass(frozen=True, kw_only=True)
class LinkContender:
    """What the ranks of a contender do.

    Attributes:
        way: ``"alone"``, ``"gradients"`` if each step averages them, or ``"local"`` if ranks synchronize now and then.
        steps: number of steps of a round.
        settings: settings of the compression or of the synchronization, as a dict.
        wire: data type in which sums of float32 are sent.
    """

    way: str
    steps: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    wire: str = "float32"


def contenders_for(every: int) -> dict[str, LinkContender]:
    """Return the contenders by name; ``every`` is the number of steps between two synchronizations."""
    overlapped = as_dict(DiLoCo(every=every, overlap=True))
    few = min(_MAX_STEPS, every)
    return {
        "alone": LinkContender(way="alone", steps=every),
        "averaged gradients": LinkContender(way="gradients", steps=2),
        "PowerSGD, rank 4": LinkContender(way="gradients", steps=few, settings=as_dict(PowerSGD(rank=4))),
        "top-k, 1%": LinkContender(way="gradients", steps=few, settings=as_dict(TopK(ratio=0.01))),
        "local SGD": LinkContender(way="local", steps=every, settings=as_dict(LocalSGD(every=every))),
        "DiLoCo": LinkContender(way="local", steps=every, settings=as_dict(DiLoCo(every=every))),
        "DiLoCo, overlapped": LinkContender(way="local", steps=every, settings=overlapped),
        "DiLoCo, overlapped, bfloat16": LinkContender(
            way="local", steps=every, settings=overlapped, wire="bfloat16"
        ),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument(
        "--megabits", default="1000,100", help="rates of the link, separated by commas (default: %(default)s)"
    )
    parser.add_argument(
        "--every", type=int, default=32, help="steps per synchronization (default: %(default)s)"
    )
    parser.add_argument(
        "--rows", type=int, default=2, help="rows in the batch of a rank (default: %(default)s)"
    )
    parser.add_argument("--positions", type=int, default=16, help="tokens of a row (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=2, help="turns of each contender (default: %(default)s)"
    )
    add_common_arguments(parser, "json")
    parser.add_argument(
        "--contenders", default="", help="names of contenders, separated by semicolons (default: all)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, and write the report that was asked for.

    Raises:
        ParamError: if an option has a value that cannot work, or hosts cannot be made here.
        RankError: if a contender failed.
        CommunicatorError: if a contender left the ranks with different parameters.
    """
    check_common_arguments(arguments, every=1, rows=1, positions=1, rounds=1)
    known = contenders_for(arguments.every)
    names = names_of(arguments.contenders, known, "--contenders", separator=";") or known
    contenders = {name: known[name] for name in dict.fromkeys(["alone", *names])}
    rates = parse_rates(arguments.megabits)
    require("link", "torch")
    if reason := why_impossible():
        raise ParamError(
            f"sparkdl bench link needs network namespaces, and this machine does not allow them: {reason}."
        )
    rows = []
    for megabits in rates:
        announce(f"measuring a link of {megabits:g} Mbit/s")
        with limited_hosts(2, megabits / 1000) as hosts:
            measured = _measure(hosts, contenders, arguments)
        rows += make_rows(f"{megabits:g} Mbit/s", measured, arguments)
    show("link", rows, COLUMNS, arguments, legend=_LEGEND, missing={})
    return 0


def _measure(
    hosts: Sequence[Namespace], contenders: Mapping[str, LinkContender], arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the seconds per step of each contender's rounds, on the slower rank; contenders take turns."""
    measured = {name: Measurements() for name in contenders}
    with ExitStack() as stack:
        groups = {
            wire: stack.enter_context(RankGroup("torch", 2, hosts=hosts, wire=wire))
            for wire in dict.fromkeys(contender.wire for contender in contenders.values())
        }
        for group in groups.values():
            group.wait_until_ready()
        for _ in range(arguments.rounds):
            for name, contender in contenders.items():
                case = {
                    "model": next(iter(MODELS)),
                    "way": contender.way,
                    "settings": dict(contender.settings),
                    "steps": contender.steps,
                    "rows": arguments.rows,
                    "positions": arguments.positions,
                }
                turn = {"benchmark": "link", "contender": name, "case": case}
                answers = groups[contender.wire].take_turn(
                    {**turn, "repetitions": 1, "operations": 2}, timeout_s=_TURN_TIMEOUT_S
                )
                results = [answer["result"] for answer in answers]
                measured[name].results.append(results)
                measured[name].times += map(max, zip(*(result["step_s"] for result in results), strict=True))
                if contender.way != "alone":
                    measured[name].check_alike(name)
    return {name: measurements.times for name, measurements in measured.items()}


def make_rows(
    case: str, measured: Mapping[str, Sequence[float]], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return one row per contender.

    ``speed`` is a share of the speed of ``alone`` by medians, and ``best_speed`` by the fastest round of each, as other
    work on the machine only adds to the time.
    """
    alone = statistics.median(measured["alone"])
    return [
        {
            **row_of(case, name, measured),
            "least_s": min(times),
            "speed": alone / statistics.median(times),
            "best_speed": min(measured["alone"]) / min(times),
            "every": arguments.every,
            "rows": arguments.rows,
            "positions": arguments.positions,
        }
        for name, times in measured.items()
    ]


COLUMNS: Columns = (
    ("link", itemgetter("case")),
    ("contender", itemgetter("contender")),
    ("step", time_of("median_s")),
    ("fastest", time_of("least_s")),
    ("speed", lambda row: f"{row['speed']:.2f}"),
    ("of fastest", lambda row: f"{row['best_speed']:.2f}"),
)
