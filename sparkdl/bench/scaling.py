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
from operator import itemgetter
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
from sparkdl.bench.contest import Measurements, announce, measure_in_turn
from sparkdl.bench.libraries import names_of, require, split_missing
from sparkdl.bench.namespaces import limited_hosts, why_impossible
from sparkdl.bench.options import add_common_arguments, check_common_arguments, check_gpus, parse_counts
from sparkdl.bench.rank_group import Answer, RankGroup
from sparkdl.bench.report import Columns, Row, format_time, percentile, plot_scaling, show, time_of
from sparkdl.cli.local_session import start_session
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
_MOST_STEPS = 4000
_TRAINING_LIMIT_S = 0.8 * _TURN_TIMEOUT_S
"""Seconds after which a training ends that has not reached its accuracy; its turn also has a last evaluation."""


@dataclass(frozen=True, kw_only=True)
class ScalingContender:
    """One way to train the job on some ranks.

    Attributes:
        name: name in the report.
        ranks: number of ranks.
        library: library that the ranks open.
        way: how ranks with the whole model average gradients; empty if the model is divided.
        sizes: sizes of the ``Parallelism``; None if ranks have the whole model.
    """

    name: str
    ranks: int
    library: str = "torch"
    way: str = ""
    sizes: Mapping[str, int] | None = field(default=None, hash=False)


Measure = Callable[[ScalingContender, Mapping[str, Any], int], list[Answer]]
"""Lets a contender take a turn of so many steps, and returns the answers of its ranks."""


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
        default=",".join(AGAINST),
        help="other libraries that train the same job, separated by commas (default: %(default)s)",
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
        "--accuracy",
        type=float,
        help=f"also measure the time until this share of held-out rows is right; a training ends after {_MOST_STEPS} "
        f"steps or {_TRAINING_LIMIT_S / 60:g} minutes",
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
    require("scaling", "torch")
    others, missing = split_missing(
        dict(AGAINST[name] for name in names_of(arguments.against, AGAINST, "--against"))
    )
    impossible = impossible_contenders(arguments, others)
    others = {name: library for name, library in others.items() if name not in impossible}
    contenders = make_contenders(arguments, counts, others)
    _say_what_limits(arguments, counts)
    cases = {
        mode: {contender: _case(arguments, contender, mode, counts) for contender in contenders}
        for mode in modes
    }
    measured = {}
    for mode in modes:
        with ExitStack() as stack:
            measured[mode] = _measure(_starter(arguments, contenders, stack), cases[mode], arguments)
    trainings: dict[int, Mapping[str, Any]] = {}
    try:
        _train_to_accuracy(arguments, cases, trainings)
    finally:  # what was measured is shown, too, if a training fails or is interrupted
        rows = [
            row
            for mode in modes
            for row in make_rows(mode, measured[mode], cases[mode], arguments, trainings)
        ]
        missing |= impossible
        show("scaling", rows, COLUMNS, arguments, legend=_LEGEND, missing=missing, plot=plot_scaling)
        for text in (*explain(rows), *explain_accuracy(arguments, trainings)):
            print(text)
    return 0


_LEGEND = (
    "speed-up: of one rank's throughput (strong), or times as many rows in the time (weak). efficiency: speed-up per\n"
    "rank. communication efficiency: share of a step in which a rank is not blocked in communication, of sparkdl's\n"
    "contenders, which count it. of alone: time of the same ranks if none communicates, as a share of a step of\n"
    "replicas. utilization: FLOP/s as a share of those of one rank alone on each rank, or on as many as\n"
    "this machine has cores for. processor: share of its threads' time in which a rank computes. epoch: by the median\n"
    "step. GPU: its load at the end of a turn, as NVML has it. memory: most of a rank, on its GPU with --device cuda.\n"
    "to accuracy: steps that one rank with as many rows takes to --accuracy, times the median step; no evaluations."
)


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
        if arguments.model in DECODERS:
            raise ParamError(f"--data names images, and {arguments.model} reads tokens, which are made.")
        for pattern in (FILES, *([HELD_OUT_FILES] if arguments.accuracy is not None else [])):
            files_of_cifar(arguments.data, pattern)
    if arguments.accuracy is not None and not 0 < arguments.accuracy < 1:
        raise ParamError(f"--accuracy {arguments.accuracy:g} is not a share between 0 and 1.")
    if arguments.accuracy is not None and arguments.model in DECODERS and arguments.accuracy >= 0.5:
        raise ParamError(
            f"--accuracy {arguments.accuracy:g} is out of reach of {arguments.model}: each token is followed by one of "
            "two at random, so half of them can be predicted. Choose less than 0.5."
        )
    _check_place(arguments, counts[-1])
    check_common_arguments(arguments)
    return counts, names_of(arguments.modes, MODES, "--modes", least=1)


def _check_place(arguments: argparse.Namespace, most_ranks: int) -> None:
    if arguments.megabits is not None:
        if arguments.master:
            raise ParamError(
                "--megabits makes hosts on this machine, and --master uses a cluster: choose one."
            )
        if reason := why_impossible():
            raise ParamError(
                f"--megabits needs network namespaces, and this machine does not allow them: {reason}."
            )
    if arguments.device == "cuda":
        if arguments.master or arguments.megabits:
            raise ParamError(
                "--device cuda uses the GPUs of this machine: leave out --master and --megabits."
            )
        check_gpus(most_ranks)


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
    arguments: argparse.Namespace, counts: Sequence[int], others: Mapping[str, str]
) -> list[ScalingContender]:
    """Return one rank alone, and for each further number of ranks those alone, each strategy and each other library.

    Args:
        arguments: options of the benchmark.
        counts: numbers of ranks, from 1 on.
        others: libraries of the other contenders, by contender.

    Raises:
        ParamError: if a strategy is none, cannot train the network, or fits none of the numbers of ranks.
    """
    is_on_gpus = arguments.device == "cuda"
    library, way = ("torch nccl", "DDP on nccl") if is_on_gpus else ("torch", "DataParallel")
    ours = functools.partial(ScalingContender, library=library)
    contenders = [ours(name="one rank", ranks=1, way="alone")]
    strategies = [text.strip() for text in arguments.strategies.split(",") if text.strip()]
    fits = dict.fromkeys(strategies, False)
    for ranks in counts[1:]:
        contenders.append(ours(name="alone", ranks=ranks, way="alone"))
        for strategy in strategies:
            sizes = _sizes(strategy, ranks, arguments.model)
            if sizes is None:
                continue
            fits[strategy] = True
            if set(sizes) == {"data"}:
                contenders.append(ours(name=strategy, ranks=ranks, way=way))
            else:
                contenders.append(ours(name=strategy, ranks=ranks, sizes=sizes))
        contenders += [
            ScalingContender(name=name, ranks=ranks, library=library, way=name)
            for name, library in others.items()
        ]
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
                f"--strategies {strategy} is not understood. Join {', '.join(DIMENSIONS)} by +, each with or without a "
                "size, for example tensor=2+shard."
            )
        sizes[name] = int(number) if number else -1
    if set(sizes) - {"data", "shard"} and not JOBS[model].can_be_divided:
        divisible = ", ".join(name for name, job in JOBS.items() if job.can_be_divided)
        raise ParamError(f"--strategies {strategy}: {model} cannot be divided so; use --model {divisible}.")
    if list(sizes.values()).count(-1) > 1:
        raise ParamError(
            f"--strategies {strategy} has several parts without a size. Give a size to all but one, for example "
            "shard=2."
        )
    fixed = prod(size for size in sizes.values() if size > 0)
    if fixed < 1 or ranks % fixed or (-1 not in sizes.values() and "data" in sizes and fixed != ranks):
        return None
    rest = ranks // fixed
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
) -> dict[ScalingContender, Measurements]:
    def take_turn(contender: ScalingContender, steps: int, _: int) -> list[Answer]:
        rows = cases[contender]["rows"]
        announce(f"measuring {contender.name} on {contender.ranks}, {rows} rows in a step")
        return measure(contender, cases[contender], steps)

    measured = measure_in_turn(
        list(cases),
        take_turn,
        seconds=arguments.seconds,
        num_rounds=arguments.rounds,
        min_repetitions=3,
        max_operations=1,
    )
    losses = {
        contender: _mean_of("loss", measurements) or 0.0 for contender, measurements in measured.items()
    }
    for contender, loss in losses.items():
        # The first step of all contenders with the same rows has the same mean loss.
        expected = next(losses[peer] for peer in losses if peer.ranks == contender.ranks)
        if not isclose(loss, expected, rel_tol=_LOSS_TOLERANCE):
            raise CommunicatorError(
                f"{contender.name} on {contender.ranks} ranks: the first loss is {loss}, and {expected} without any "
                "communication."
            )
    return measured


def _mean_of(field: str, measurements: Measurements) -> float | None:
    """The mean of a field of all ranks' results in which it is not None; None if it is None in all."""
    values = [result[field] for turn in measurements.results for result in turn if result[field] is not None]
    return statistics.fmean(values) if values else None


def _train_to_accuracy(
    arguments: argparse.Namespace,
    cases: Mapping[str, Mapping[ScalingContender, Mapping[str, Any]]],
    trainings: dict[int, Mapping[str, Any]],
) -> None:
    """Train once with each number of rows of a step: all contenders with as many rows make the steps of one rank.

    Args:
        arguments: options of the benchmark.
        cases: the turns' settings, by mode and contender.
        trainings: where the number of steps and the best accuracy of each training go, by rows of a step.
    """
    if arguments.accuracy is None:
        return
    of_contenders = [case for of_mode in cases.values() for case in of_mode.items()]
    one, case = next(case for case in of_contenders if case[0].name == "one rank")
    limits = {"accuracy": arguments.accuracy, "most_steps": _MOST_STEPS, "limit_s": _TRAINING_LIMIT_S}
    with ExitStack() as stack:
        measure = _starter(arguments, [one], stack)
        for rows in sorted({case["rows"] for _, case in of_contenders}):
            announce(f"training until {arguments.accuracy:g}, {rows} rows in a step")
            (answer,) = measure(one, {**case, "rows": rows, **limits}, 1)
            trainings[rows] = answer["result"]


def make_rows(
    mode: str,
    measured: Mapping[ScalingContender, Measurements],
    cases: Mapping[ScalingContender, Mapping[str, Any]],
    arguments: argparse.Namespace,
    trainings: Mapping[int, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return one row per contender and number of ranks.

    ``speed_up`` is the throughput as a multiple of one rank's, ``efficiency`` that per rank.
    ``communication_efficiency`` is the share of a step in which a rank is not blocked in communication, None where that
    is not counted. ``of_alone`` is the time of ranks that do not communicate as a share of a step, None for divided
    models, whose arithmetic is another one. ``utilization`` is the speed-up as a share of the possible one, which on
    this machine is the number of ranks that have cores of their own; as all do the same arithmetic, it is a share of
    FLOP/s. ``accuracy`` is the best of the training with as many rows in a step, and ``accuracy_s`` None if that is not
    the wished one.
    """
    has_devices = arguments.master or arguments.device == "cuda"
    possible = float("inf") if has_devices else usable_cores() / arguments.threads
    medians = {contender: statistics.median(measure.times) for contender, measure in measured.items()}
    one = next(contender for contender in measured if contender.name == "one rank")
    alone = {contender.ranks: medians[contender] for contender in measured if contender.way == "alone"}
    rows = []
    for contender, measurements in measured.items():
        median, rows_of_step = medians[contender], cases[contender]["rows"]
        throughput = rows_of_step / median
        speed_up = throughput / (cases[one]["rows"] / medians[one])
        communicates = contender.way != "alone"
        is_counted = communicates and contender.library in ("torch", "torch nccl")
        waits = _mean_of("waits", measurements) if is_counted else None
        training = trainings.get(rows_of_step) if communicates or contender is one else None
        results = [result for turn in measurements.results for result in turn]
        rows.append(
            {
                "case": f"{arguments.model}, {mode}",
                "contender": contender.name,
                "ranks": contender.ranks,
                "rows": rows_of_step,
                "repetitions": len(measurements.times),
                "median_s": median,
                "p90_s": percentile(measurements.times, 0.9),
                "rows_per_s": throughput,
                "tokens_per_s": throughput * POSITIONS if arguments.model in DECODERS else None,
                "epoch_s": JOBS[arguments.model].epoch / throughput,
                "speed_up": speed_up,
                "efficiency": speed_up / contender.ranks,
                "communication_efficiency": None if waits is None else 1.0 - waits,
                "of_alone": min(1.0, alone[contender.ranks] / median)
                if communicates and contender.sizes is None
                else None,
                "utilization": speed_up / min(contender.ranks, possible),
                "processor": _mean_of("processor", measurements),
                "gpu": _mean_of("gpu", measurements),
                "memory_bytes": max(result["memory_bytes"] for result in results),
                "accuracy": training and training["accuracy"],
                "accuracy_s": training["steps"] * median
                if training and training["accuracy"] >= arguments.accuracy
                else None,
            }
        )
    return rows


def explain(rows: Sequence[Row]) -> list[str]:
    """Say for replicas on each number of ranks what is missing from a speed-up of that number."""
    alone = {(row["case"], row["ranks"]): row["speed_up"] for row in rows if row["contender"] == "alone"}
    texts = []
    for row in rows:
        if row["of_alone"] is None:
            continue
        ranks, speed_up, reachable = row["ranks"], row["speed_up"], alone[row["case"], row["ranks"]]
        texts.append(
            f"{row['case']}: {row['contender']} on {ranks} ranks has a speed-up of {speed_up:.2f}. Without "
            f"communication the ranks reach {reachable:.2f}: of the gap to {ranks}, what they share makes "
            f"{max(0.0, ranks - reachable):.2f}, and communication {max(0.0, reachable - speed_up):.2f}."
        )
    return texts


def explain_accuracy(arguments: argparse.Namespace, trainings: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Say for each training that did not reach its accuracy how far it came."""
    return [
        f"{arguments.model} with {rows} rows in a step did not reach {arguments.accuracy:g} in {training['steps']:,} "
        f"steps; the best was {training['accuracy']:.3g}. A training ends after {_MOST_STEPS:,} steps or "
        f"{_TRAINING_LIMIT_S / 60:g} minutes."
        for rows, training in trainings.items()
        if training["accuracy"] < arguments.accuracy
    ]


def _share_of(field: str) -> Callable[[Row], str]:
    return lambda row: "" if row[field] is None else f"{row[field]:.0%}"


COLUMNS: Columns = (
    ("case", itemgetter("case")),
    ("ranks", lambda row: str(row["ranks"])),
    ("contender", itemgetter("contender")),
    ("step", time_of("median_s")),
    ("rows/s", lambda row: f"{row['rows_per_s']:.4g}"),
    ("epoch", time_of("epoch_s")),
    ("speed-up", lambda row: f"{row['speed_up']:.2f}"),
    ("efficiency", lambda row: f"{row['efficiency']:.2f}"),
    ("communication efficiency", _share_of("communication_efficiency")),
    ("of alone", _share_of("of_alone")),
    ("utilization", _share_of("utilization")),
    ("processor", _share_of("processor")),
    ("GPU", _share_of("gpu")),
    ("memory", lambda row: f"{row['memory_bytes'] / 2**20:.0f} MiB"),
    ("to accuracy", lambda row: "" if row["accuracy_s"] is None else format_time(row["accuracy_s"])),
)
