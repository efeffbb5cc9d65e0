"""``sparkdl bench scaling``: how much faster one job is with more ranks, by how its ranks share the work.

Runs where it is called. The ranks are processes on this machine, or on hosts made of network namespaces, or tasks of a
Spark cluster; all rank counts and contenders take turns, so that a machine that becomes slower slows down all alike.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import isclose, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.bench.contenders.scaling_jobs import (
    DECODERS,
    FILES,
    HELD_OUT_FILES,
    JOBS,
    POSITIONS,
    files_of_cifar,
)
from sparkdl.bench.contest import announce
from sparkdl.bench.libraries import missing_contenders, names_of
from sparkdl.bench.namespaces import limited_hosts, why_impossible
from sparkdl.bench.options import add_common_arguments, check_common_arguments, check_gpus, parse_counts
from sparkdl.bench.rank_group import Answer, RankGroup
from sparkdl.bench.report import format_time, percentile, plot_scaling, show
from sparkdl.cli.local_session import start_session
from sparkdl.collective.telemetry.report import format_columns
from sparkdl.cores import usable_cores
from sparkdl.errors import CommunicatorError, ParamError
from sparkdl.launch import check_cluster, run_on_ranks

if TYPE_CHECKING:
    from sparkdl.bench.namespaces import Namespace
    from sparkdl.launch import RankContext

DIMENSIONS = ("data", "shard", "tensor", "context", "pipeline")
AGAINST = {
    "gloo": ("DDP on gloo", "gloo"),
    "gloo tuned": ("DDP on gloo tuned", "gloo tuned"),
    "mpi": ("DDP on mpi", "gloo and mpi"),
    "horovod": ("hvd of Horovod", "horovod"),
}
"""Contender and library of each choice of ``--against``."""

MODES = ("strong", "weak")
_LOSS_TOLERANCE = 1e-3
_TURN_TIMEOUT_S = 1800.0
_MOST_STEPS = 200


@dataclass(frozen=True, kw_only=True)
class ScalingContender:
    """One way to train the job on some ranks.

    Attributes:
        name: name in the report.
        ranks: number of ranks.
        library: library that the ranks open.
        way: how ranks with the whole model average gradients; empty if the model is divided.
        sizes: sizes of the ``Parallelism``; None if ranks have the whole model.
        readers: number of ranks, or groups of ranks, among which the rows of a step are shared.
    """

    name: str
    ranks: int
    library: str = "torch"
    way: str = ""
    sizes: Mapping[str, int] | None = field(default=None, hash=False)
    readers: int = 1


Measure = Callable[[ScalingContender, Mapping[str, Any], int], list[Answer]]
"""Lets a contender take a turn of so many steps, and returns the answers of its ranks."""


@dataclass(kw_only=True)
class _Measured:
    """Seconds of each step on the slowest rank, and further results of the ranks."""

    times: list[float] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("--model", choices=list(JOBS), default="cnn", help="network (default: %(default)s)")
    parser.add_argument(
        "--ranks", default="1,2", help="numbers of ranks, separated by commas (default: %(default)s)"
    )
    parser.add_argument(
        "--strategies",
        default="data",
        help="ways to share the work, separated by commas: data, shard, tensor, context or pipeline over all ranks, or "
        "with sizes and joined, as tensor=2+shard; ranks that remain are replicas (default: %(default)s)",
    )
    parser.add_argument(
        "--against",
        default="gloo,gloo tuned",
        help=f"other libraries that train the same job, of {', '.join(AGAINST)} (default: %(default)s)",
    )
    parser.add_argument(
        "--modes",
        default=",".join(MODES),
        help="strong: a step has the same rows on any number of ranks; weak: a rank has (default: %(default)s)",
    )
    parser.add_argument("--batch", type=int, help="rows of a step on the most ranks (default: by network)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank (default: %(default)s)")
    parser.add_argument(
        "--data", default="", metavar="FOLDER", help="images of CIFAR-10, binary version (default: made)"
    )
    parser.add_argument(
        "--accuracy", type=float, help="also measure the time until this share of held-out rows is right"
    )
    parser.add_argument(
        "--megabits", type=float, help="make a host for each rank, with links of this rate in Mbit/s"
    )
    parser.add_argument("--master", help="run the ranks on a Spark cluster, by the URL of its master")
    add_common_arguments(parser, "seconds", "device", "json", "plot", seconds=10.0)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, and write the report and the plot that were asked for.

    Raises:
        ParamError: if an option has a value that cannot work, or hosts cannot be made here.
        RankError: if a contender failed.
        CommunicatorError: if the loss of a contender differs from the loss of one rank.
    """
    counts, modes = _check(arguments)
    if needed := missing_contenders({"torch": "torch"}):
        raise ParamError(f"sparkdl bench scaling: {needed['torch']}")
    others = dict(AGAINST[name] for name in _others(arguments))
    missing = missing_contenders(others) | impossible_contenders(arguments, others)
    contenders = make_contenders(arguments, counts, missing)
    _say_what_limits(arguments, counts)
    rows = []
    for mode in modes:
        cases = {contender: _case(arguments, contender, mode, counts) for contender in contenders}
        with ExitStack() as stack:
            measure = _starter(arguments, contenders, stack)
            measured = _measure(measure, cases, arguments)
            steps = _steps_to_accuracy(measure, cases, arguments)
        rows += make_rows(mode, measured, cases, arguments, steps)
    show("scaling", rows, table=format_rows(rows), legend=_LEGEND, missing=missing, path=arguments.json)
    if arguments.plot is not None:
        plot_scaling(rows, arguments.plot)
    return 0


_LEGEND = (
    "speed-up: of one rank's throughput (strong), or times as many rows in the time (weak). efficiency: speed-up per\n"
    "rank. communication efficiency: share of a step in which a rank is not blocked in communication, of sparkdl's\n"
    "contenders, which count it. of alone: time of the same ranks if none communicates, as a share of a step of\n"
    "replicas. utilization: FLOP/s as a share of those of one rank alone on each rank, or on as many as\n"
    "this machine has cores for. processor: share of its threads' time in which a rank computes. epoch: by the median\n"
    "step. GPU: its load at the end of a turn, as NVML has it. memory: most of a rank, on its GPU with --device cuda."
)


def _others(arguments: argparse.Namespace) -> list[str]:
    return names_of(arguments.against, list(AGAINST), "--against")


def _check(arguments: argparse.Namespace) -> tuple[list[int], list[str]]:
    """Check the options, and return the rank counts, from 1 on, and the modes."""
    counts = sorted({1, *parse_counts(arguments.ranks)})
    if len(counts) < 2:
        raise ParamError(f"--ranks {arguments.ranks} shows no scaling; name a number above 1, as 1,2,4.")
    if arguments.batch is None:
        arguments.batch = JOBS[arguments.model].batch
    for option in ("batch", "threads", "rounds", "megabits"):
        value = getattr(arguments, option)
        if value is not None and not value > 0:
            raise ParamError(f"--{option} {value:g} is too little; use more than 0.")
    for count in counts:
        if arguments.batch % count:
            raise ParamError(
                f"--batch {arguments.batch} cannot be shared by {count} ranks alike; use a multiple of it."
            )
    if arguments.data:
        _check_data(arguments)
    if arguments.accuracy is not None and not 0 < arguments.accuracy < 1:
        raise ParamError(f"--accuracy {arguments.accuracy:g} is no share between 0 and 1.")
    if arguments.megabits is not None:
        _check_hosts(arguments)
    if arguments.device == "cuda":
        if arguments.master or arguments.megabits:
            raise ParamError(
                "--device cuda uses the GPUs of this machine: leave out --master and --megabits."
            )
        check_gpus(counts[-1])
    check_common_arguments(arguments)
    return counts, names_of(arguments.modes, MODES, "--modes")


def _check_data(arguments: argparse.Namespace) -> None:
    if arguments.model in DECODERS:
        raise ParamError(f"--data names images, and {arguments.model} reads tokens, which are made.")
    for pattern in (FILES, *([HELD_OUT_FILES] if arguments.accuracy is not None else [])):
        files_of_cifar(arguments.data, pattern)


def _check_hosts(arguments: argparse.Namespace) -> None:
    if arguments.master:
        raise ParamError("--megabits makes hosts on this machine, and --master uses a cluster: choose one.")
    if reason := why_impossible():
        raise ParamError(f"--megabits makes hosts of network namespaces: {reason}.")


def impossible_contenders(arguments: argparse.Namespace, contenders: Iterable[str]) -> dict[str, str]:
    """Return why contenders of other libraries cannot take part with these options, by contender."""
    if arguments.master:
        return dict.fromkeys(contenders, "the tasks of --master are launched by sparkdl alone.")
    if arguments.device == "cuda":
        reason = "its ranks train on CPUs here, and --device cuda on GPUs."
        return {name: reason for name in contenders if name != AGAINST["horovod"][0]}
    if not arguments.megabits:
        return {}
    why = {
        "DDP on gloo tuned": "its four connections are over loopback, which does not join the hosts of --megabits.",
        "DDP on mpi": "its ranks are started on one host, and --megabits makes several.",
        "hvd of Horovod": "its ranks are started on one host, and --megabits makes several.",
    }
    return {name: why[name] for name in contenders if name in why}


def _say_what_limits(arguments: argparse.Namespace, counts: Sequence[int]) -> None:
    cores = usable_cores()
    threads = "a thread" if arguments.threads == 1 else f"{arguments.threads} threads"
    if not arguments.master and counts[-1] * arguments.threads > cores:
        print(
            f"This machine has {cores} cores. {counts[-1]} ranks share them, with {threads} each, so their speed-up is "
            "limited by that and says little about a cluster."
        )


def make_contenders(
    arguments: argparse.Namespace, counts: Sequence[int], missing: Mapping[str, str]
) -> list[ScalingContender]:
    """Return one rank alone, and for each further number of ranks those alone, each strategy and each other library.

    Raises:
        ParamError: if a strategy is none, cannot train the network, or fits none of the numbers of ranks.
    """
    is_on_gpus = arguments.device == "cuda"
    library, way = ("torch nccl", "DDP on nccl") if is_on_gpus else ("torch", "DataParallel")
    own = functools.partial(ScalingContender, library=library)
    contenders = [own(name="one rank", ranks=1, way="alone")]
    strategies = [text.strip() for text in arguments.strategies.split(",") if text.strip()]
    fits = dict.fromkeys(strategies, False)
    for ranks in counts[1:]:
        contenders.append(own(name="alone", ranks=ranks, way="alone", readers=ranks))
        for strategy in strategies:
            sizes = _sizes(strategy, ranks, arguments.model)
            if sizes is None:
                continue
            fits[strategy] = True
            if set(sizes) == {"data"}:
                contenders.append(own(name=strategy, ranks=ranks, way=way, readers=ranks))
                continue
            readers = ranks // prod(sizes.get(name, 1) for name in ("tensor", "context", "pipeline"))
            contenders.append(own(name=strategy, ranks=ranks, sizes=sizes, readers=readers))
        for other in _others(arguments):
            name, library = AGAINST[other]
            if name not in missing:
                contenders.append(
                    ScalingContender(name=name, ranks=ranks, library=library, way=name, readers=ranks)
                )
    if unfit := [strategy for strategy, has_fit in fits.items() if not has_fit]:
        raise ParamError(f"--strategies {unfit[0]} fits none of the numbers of ranks, {arguments.ranks}.")
    return contenders


def _sizes(strategy: str, ranks: int, model: str) -> dict[str, int] | None:
    """The sizes of a strategy on so many ranks; None if they do not fit."""
    sizes: dict[str, int] = {}
    for part in strategy.split("+"):
        name, _, number = part.strip().partition("=")
        if name not in DIMENSIONS or name in sizes or (number and not (number.isdecimal() and int(number))):
            raise ParamError(
                f"--strategies {strategy} is not understood; it is made of {', '.join(DIMENSIONS)}, with or without a "
                "size, as tensor=2+shard."
            )
        sizes[name] = int(number) if number else -1
    if set(sizes) - {"data", "shard"} and not JOBS[model].can_be_divided:
        divisible = ", ".join(name for name, job in JOBS.items() if job.can_be_divided)
        raise ParamError(f"--strategies {strategy}: {model} cannot be divided so; use --model {divisible}.")
    if list(sizes.values()).count(-1) > 1:
        raise ParamError(
            f"--strategies {strategy} leaves more than one size open; give all but one, as shard=2."
        )
    given = prod(size for size in sizes.values() if size > 0)
    if given < 1 or ranks % given or (-1 not in sizes.values() and "data" in sizes and given != ranks):
        return None
    rest = ranks // given
    sizes = {name: rest if size == -1 else size for name, size in sizes.items()}
    sizes.setdefault("data", ranks // prod(sizes.values()))
    return {name: size for name, size in sizes.items() if size > 1 or name == "data"}


def _case(
    arguments: argparse.Namespace, contender: ScalingContender, mode: str, counts: Sequence[int]
) -> dict[str, Any]:
    """The turn's settings; in weak scaling a step has as many rows as ranks times those of one."""
    rows = arguments.batch if mode == "strong" else arguments.batch // counts[-1] * contender.ranks
    return {
        "model": arguments.model,
        "rows": rows,
        "threads": arguments.threads,
        "data": arguments.data,
        "device": arguments.device,
        "way": contender.way,
        "sizes": None if contender.sizes is None else dict(contender.sizes),
    }


def _starter(
    arguments: argparse.Namespace, contenders: Sequence[ScalingContender], stack: ExitStack
) -> Measure:
    """Start the ranks of all contenders, and return what lets them take a turn."""
    most = max(contender.ranks for contender in contenders)
    if arguments.master:
        return _turns_on_spark(arguments.master, most, stack)
    hosts: Sequence[Namespace] = ()
    if arguments.megabits is not None:
        hosts = stack.enter_context(limited_hosts(most, arguments.megabits / 1000))
    groups = {
        (library, ranks): stack.enter_context(RankGroup(library, ranks, hosts=hosts[:ranks]))
        for library, ranks in dict.fromkeys((contender.library, contender.ranks) for contender in contenders)
    }
    for group in groups.values():
        group.wait_until_ready()

    def measure(contender: ScalingContender, case: Mapping[str, Any], steps: int) -> list[Answer]:
        turn = {"benchmark": "scaling", "contender": contender.name, "case": case}
        group = groups[contender.library, contender.ranks]
        return group.take_turn({**turn, "repetitions": steps, "operations": 1}, timeout_s=_TURN_TIMEOUT_S)

    return measure


def _turns_on_spark(master: str, most: int, stack: ExitStack) -> Measure:
    """Start a session, and return what lets a contender take a turn there.

    Args:
        master: URL of the cluster's master.
        most: largest number of ranks of a contender.
        stack: stops the session at its end.
    """
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparkdl-bench-")))
    session = stack.enter_context(start_session("sparkdl bench scaling", master, folder))
    check_cluster(session, num_ranks=most)

    def measure(contender: ScalingContender, case: Mapping[str, Any], steps: int) -> list[Answer]:
        return run_on_ranks(
            take_turn_on_rank,
            contender.name,
            dict(case),
            steps,
            num_ranks=contender.ranks,
            spark=session,
            threads_per_rank=case["threads"],
            modules=("torch",),
        )

    return measure


def take_turn_on_rank(context: RankContext, contender: str, case: dict[str, Any], steps: int) -> Answer:
    """Take a turn on a rank that Spark has started."""
    import sparkdl.torch
    from sparkdl.bench.contenders.rank import TRIALS, take_turn

    sparkdl.torch.init_process_group(context.communicator)
    try:
        trial = TRIALS["scaling"](context.communicator, contender, case)
        times = take_turn(context.communicator, trial, steps, 1)
        return {"times": times, "result": trial.result()}
    finally:
        sparkdl.torch.destroy_process_group()


def _measure(
    measure: Measure, cases: Mapping[ScalingContender, Mapping[str, Any]], arguments: argparse.Namespace
) -> dict[ScalingContender, _Measured]:
    measured = {contender: _Measured() for contender in cases}
    steps = dict.fromkeys(cases, 2)  # of the first turn, which only tells how many the others take
    for turn in range(arguments.rounds + 1):
        for contender, case in cases.items():
            when = f"turn {turn} of {arguments.rounds}" if turn else "warm-up"
            announce(
                f"measuring {contender.name} on {contender.ranks}, {case['rows']} rows in a step, {when}"
            )
            answers = measure(contender, case, steps[contender])
            times = [max(step) for step in zip(*(answer["times"] for answer in answers), strict=True)]
            if turn == 0:
                wanted = arguments.seconds / arguments.rounds / min(times)
                steps[contender] = int(min(_MOST_STEPS, max(3, wanted)))
            else:
                measured[contender].times += times
                measured[contender].results += [answer["result"] for answer in answers]
    _check_losses(measured)
    return measured


def _check_losses(measured: Mapping[ScalingContender, _Measured]) -> None:
    """Check that the first step of all contenders with the same rows has the same mean loss."""
    for contender, measure in measured.items():
        loss = statistics.fmean(result["loss"] for result in measure.results)
        peer = next(other for other in measured if other.ranks == contender.ranks)
        expected = statistics.fmean(result["loss"] for result in measured[peer].results)
        if not isclose(loss, expected, rel_tol=_LOSS_TOLERANCE):
            raise CommunicatorError(
                f"{contender.name} on {contender.ranks} ranks: the first loss is {loss}, and {expected} without any "
                "communication."
            )


def _steps_to_accuracy(
    measure: Measure, cases: Mapping[ScalingContender, Mapping[str, Any]], arguments: argparse.Namespace
) -> dict[int, int | None]:
    """The number of steps to the accuracy by rows of a step; all contenders with as many rows make the same steps."""
    steps: dict[int, int | None] = {}
    if arguments.accuracy is None:
        return steps
    for contender, case in cases.items():
        is_one = contender.name == "one rank" or contender.way in ("DataParallel", "DDP on nccl")
        if is_one and case["rows"] not in steps:
            announce(f"training on {contender.ranks} until {arguments.accuracy:g}")
            answers = measure(contender, {**case, "accuracy": arguments.accuracy}, 1)
            steps[case["rows"]] = answers[0]["result"]["steps"]
    return steps


def make_rows(
    mode: str,
    measured: Mapping[ScalingContender, _Measured],
    cases: Mapping[ScalingContender, Mapping[str, Any]],
    arguments: argparse.Namespace,
    steps_to_accuracy: Mapping[int, int | None],
) -> list[dict[str, Any]]:
    """Return one row per contender and number of ranks.

    ``speed_up`` is the throughput as a multiple of one rank's, ``efficiency`` that per rank.
    ``communication_efficiency`` is the share of a step in which a rank is not blocked in communication, None where that
    is not counted. ``of_alone`` is the time of ranks that do not communicate as a share of a step, None for divided
    models, whose arithmetic is another one. ``utilization`` is the speed-up as a share of the possible one, which on
    this machine is the number of ranks that have cores of their own; as all do the same arithmetic, it is a share of
    FLOP/s.
    """
    has_devices = arguments.master or arguments.device == "cuda"
    possible = float("inf") if has_devices else usable_cores() / arguments.threads
    medians = {contender: statistics.median(measure.times) for contender, measure in measured.items()}
    (one,) = (contender for contender in measured if contender.name == "one rank")
    alone = {contender.ranks: medians[contender] for contender in measured if contender.way == "alone"}
    speed_of_one = cases[one]["rows"] / medians[one]
    rows = []
    for contender, measure in measured.items():
        median, rows_of_step = medians[contender], cases[contender]["rows"]
        throughput = rows_of_step / median
        counted = [result["waits"] for result in measure.results if result["waits"] is not None]
        is_replica = contender.way != "alone" and contender.sizes is None
        is_counted = counted and contender.way != "alone" and contender.library in ("torch", "torch nccl")
        steps = steps_to_accuracy.get(rows_of_step)
        is_trained = contender.way != "alone" or contender is one
        rows.append(
            {
                "case": f"{arguments.model}, {mode}",
                "contender": contender.name,
                "ranks": contender.ranks,
                "rows": rows_of_step,
                "repetitions": len(measure.times),
                "median_s": median,
                "p90_s": percentile(measure.times, 0.9),
                "rows_per_s": throughput,
                "tokens_per_s": throughput * POSITIONS if arguments.model in DECODERS else None,
                "epoch_s": JOBS[arguments.model].epoch / throughput,
                "speed_up": throughput / speed_of_one,
                "efficiency": throughput / speed_of_one / contender.ranks,
                "communication_efficiency": 1.0 - statistics.fmean(counted) if is_counted else None,
                "of_alone": min(1.0, alone[contender.ranks] / median) if is_replica else None,
                "utilization": throughput / speed_of_one / min(contender.ranks, possible),
                "processor": statistics.fmean(result["processor"] for result in measure.results),
                "gpu": _mean([result["gpu"] for result in measure.results]),
                "memory_bytes": max(result["memory_bytes"] for result in measure.results),
                "accuracy_s": steps * median if steps is not None and is_trained else None,
            }
        )
    return rows


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def format_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table to print."""
    has_accuracy, has_gpus = (any(row[name] is not None for row in rows) for name in ("accuracy_s", "gpu"))
    header = [
        "case",
        "ranks",
        "contender",
        "step",
        "rows/s",
        "epoch",
        "speed-up",
        "efficiency",
        "communication efficiency",
        "of alone",
        "utilization",
        "processor",
        *(["GPU"] if has_gpus else []),
        "memory",
        *(["to accuracy"] if has_accuracy else []),
    ]
    table = []
    for row in rows:
        cells = [
            row["case"],
            str(row["ranks"]),
            row["contender"],
            format_time(row["median_s"]),
            f"{row['rows_per_s']:.4g}",
            format_time(row["epoch_s"]),
            f"{row['speed_up']:.2f}",
            f"{row['efficiency']:.2f}",
            *(
                "" if row[name] is None else f"{row[name]:.0%}"
                for name in ("communication_efficiency", "of_alone")
            ),
            f"{row['utilization']:.0%}",
            f"{100 * row['processor']:.0f}%",
        ]
        if has_gpus:
            cells.append("" if row["gpu"] is None else f"{row['gpu']:.0%}")
        cells.append(f"{row['memory_bytes'] / 2**20:.0f} MiB")
        if has_accuracy:
            cells.append("" if row["accuracy_s"] is None else format_time(row["accuracy_s"]))
        table.append(tuple(cells))
    return format_columns(tuple(header), table)
