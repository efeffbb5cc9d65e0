"""``sparkdl plan``: which parallelism a model takes on a cluster, how much memory, and how long a step lasts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdl.bench.options import add_common_arguments, check_common_arguments, parse_counts, parse_rates
from sparkdl.cores import usable_cores
from sparkdl.errors import ParamError, RankError

if TYPE_CHECKING:
    from sparkdl.planner.cluster import Cluster, Link
    from sparkdl.planner.layouts import Plan

_DESCRIPTION = """\
Estimates memory and time of each layout of a model on a cluster, and prints those that fit, the fastest first; of
layouts that differ by about a percent the simplest one. With several numbers of --hosts it prints the best layout on
each, and how they scale; for numbers on which the model does not fit, it prints why. Nothing is started, unless
--measure measures this machine. The exit status is 0 if the model fits on at least one of the numbers of hosts, and 2
if it fits on none or an option cannot work.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.description = _DESCRIPTION
    parser.add_argument(
        "model",
        nargs="?",
        help="name such as llama-8b, folder of a Hugging Face model, or sizes such as "
        "width=4096,layers=32,heads=32,vocabulary=32000 (a module is planned in Python: sparkdl.planner.plan)",
    )
    parser.add_argument("--batch", type=int, metavar="ROWS", help="rows of an update, over all ranks")
    parser.add_argument(
        "--sequence", type=int, metavar="N", help="positions of a row (default: those of the model)"
    )
    parser.add_argument(
        "--precision",
        help="bfloat16, as estimators train with it; bfloat16-shards, as scripts with shard(dtype=torch.bfloat16); or "
        "float32 (default: bfloat16 on GPUs, float32 on CPUs)",
    )
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument(
        "--hosts", default="1", metavar="N[,N...]", help="number of hosts (default: %(default)s)"
    )
    cluster.add_argument(
        "--devices-per-host",
        type=int,
        default=8,
        metavar="N",
        help="GPUs, or CPU ranks, of a host (default: %(default)s)",
    )
    cluster.add_argument("--device", help="GPU, or cpu with --measure (default: h100, or this machine's)")
    cluster.add_argument(
        "--memory", type=float, metavar="GIB", help="memory of a device (default: of its data sheet)"
    )
    cluster.add_argument(
        "--inside", metavar="LINK", help="link inside of a host (default: the usual one of the device)"
    )
    cluster.add_argument(
        "--between",
        type=float,
        metavar="GBIT/S",
        help="network of a host (default: 50 for each GPU, 10 for a CPU host)",
    )
    cluster.add_argument("--weak", action="store_true", help="let the batch grow with the hosts")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure the layers of the model on this machine first, and without --inside the link between its ranks "
        "or GPUs; not the links between hosts, which are those of --between (sparkdl doctor --master URL measures what "
        "TCP transfers between two hosts; ranks with parallelism=auto measure all links)",
    )
    parser.add_argument(
        "--published",
        action="store_true",
        help="print published runs, and what the planner says about them",
    )
    parser.add_argument(
        "--validate",
        action="store_true",
        help="train decoders in many layouts on this machine, and print what the planner says about each",
    )
    parser.add_argument(
        "--megabits",
        metavar="RATE[,RATE...]",
        help="with --validate: train them on hosts made of network namespaces, with links of these rates in Mbit/s",
    )
    parser.add_argument(
        "--top", type=int, default=10, metavar="N", help="layouts to print (default: %(default)s)"
    )
    parser.add_argument(
        "--details",
        action="store_true",
        help="also print the time and the memory of each layout by kind; of --validate, where measured time goes",
    )
    add_common_arguments(parser, "json", "plot")


def run(options: argparse.Namespace) -> int:
    """Print the table, and write the report and the picture that were asked for.

    Raises:
        ParamError: if an option cannot work, or the model fits nowhere.
    """
    check_common_arguments(options, top=1)
    if options.published and options.model is not None:
        raise ParamError(
            f"--published compares the planner with published runs, and {options.model} is a model to plan. Leave one "
            "of them out."
        )
    if options.measure and options.device not in (None, "cpu"):
        raise ParamError(
            f"--measure measures the device of this machine, and --device names {options.device}. Leave one of them "
            "out."
        )
    if options.published:
        from sparkdl.planner.published import compare, compare_orders
        from sparkdl.planner.report import print_orders, print_published

        content = {"runs": compare(), "orders": compare_orders()}
        print_published(content["runs"])
        print_orders(content["orders"])
        _write(options, content)
        return 0
    if options.megabits is not None and not options.validate:
        raise ParamError(
            "--megabits has an effect only with --validate. Add --validate, or leave --megabits out."
        )
    if options.validate:
        _validate(options)
        return 0
    if options.model is None or options.batch is None:
        raise ParamError("sparkdl plan needs a model and --batch, such as: sparkdl plan llama-8b --batch 128")
    hosts = parse_counts(options.hosts, "hosts")
    plans, refusals = _plans(options, hosts)
    if not plans:
        raise next(iter(refusals.values()))
    from sparkdl.planner import report

    if len(hosts) == 1:
        report.print_plan(plans[0], most=options.top, details=options.details)
        _write(options, plans[0].as_dict())
        if options.plot is not None:
            report.plot_plan(plans[0], options.plot, most=options.top)
        return 0
    for refusal in refusals.values():
        print(refusal)
    report.print_scaling(plans, is_weak=options.weak)
    refused = [
        {"hosts": number, "ranks": number * options.devices_per_host, "refusal": str(refusal)}
        for number, refusal in refusals.items()
    ]
    _write(options, sorted([*report.scaling_rows(plans), *refused], key=lambda row: row["hosts"]))
    if options.plot is not None:
        report.plot_scaling(plans, options.plot, is_weak=options.weak)
    return 0


def _validate(options: argparse.Namespace) -> None:
    from sparkdl.bench.contenders.scaling_jobs import DECODERS
    from sparkdl.bench.libraries import names_of
    from sparkdl.bench.namespaces import why_impossible
    from sparkdl.planner import report
    from sparkdl.planner.comparison import compare_steps

    models = (
        list(DECODERS) if options.model is None else names_of(options.model, list(DECODERS), "--validate")
    )
    rates: Sequence[float | None] = [None]
    if options.megabits is not None:
        rates = parse_rates(options.megabits)
        if reason := why_impossible():
            raise ParamError(
                f"--megabits needs network namespaces, and this machine does not allow them: {reason}."
            )
    rows = [row for rate in rates for row in compare_steps(models, rate)]
    report.print_comparison(rows, details=options.details)
    _write(options, rows)
    if options.plot is not None:
        report.plot_comparison(rows, options.plot)


def _plans(options: argparse.Namespace, hosts: list[int]) -> tuple[list[Plan], dict[int, ParamError]]:
    """Return the plan on each number of hosts on which the model fits, and an error for each other number."""
    from sparkdl.planner.layouts import plan

    batches = dict.fromkeys(hosts, options.batch)
    if options.weak:  # as many rows on each host as on the first number of hosts
        batches = {number: options.batch * number / hosts[0] for number in hosts}
        for number, batch in batches.items():
            if batch % 1:
                raise ParamError(
                    f"With --weak, {options.batch} rows on {hosts[0]} hosts are {batch:g} rows on {number} hosts, "
                    f"which is not a whole number. Choose a --batch that is a multiple of {hosts[0]}."
                )
    cluster = _cluster(options)
    precision = options.precision or ("float32" if cluster.device.is_cpu else "bfloat16")
    plans, refusals = [], {}
    for number, batch in batches.items():
        at = replace(cluster, hosts=number)
        try:
            plans.append(
                plan(options.model, at, batch=int(batch), precision=precision, sequence=options.sequence)
            )
        except ParamError as error:
            refusals[number] = error
    return plans, refusals


def _cluster(options: argparse.Namespace) -> Cluster:
    from sparkdl.planner.cluster import make_cluster

    cluster_options: dict[str, Any] = {
        "devices_per_host": options.devices_per_host,
        "inside": options.inside,
        "between": options.between,
        "memory_gib": options.memory,
    }
    if not options.measure:
        if options.device == "cpu":
            raise ParamError("The speed of --device cpu is not in a table: add --measure.")
        return make_cluster("h100" if options.device is None else options.device, **cluster_options)
    import torch

    from sparkdl.planner.measure import measure_device
    from sparkdl.planner.shape import RECIPES, shape_from_text

    has_gpu, ranks = torch.cuda.is_available(), options.devices_per_host
    if options.device == "cpu" and has_gpu:
        raise ParamError(
            "--measure measures the GPU of this machine, and --device names cpu. Set CUDA_VISIBLE_DEVICES= (empty) to "
            "measure its cores."
        )
    shape = shape_from_text(options.model, sequence=options.sequence)
    precision = options.precision or ("bfloat16" if has_gpu else "float32")
    if precision not in RECIPES:
        raise ParamError(f"--precision must be one of {', '.join(RECIPES)}, got {precision!r}.")
    cores = usable_cores()
    if not has_gpu and ranks > cores:
        raise ParamError(
            f"--measure runs {ranks} ranks at once, and this machine has {cores} cores. Give --devices-per-host "
            f"{cores}, or fewer."
        )
    device = measure_device(shape, RECIPES[precision], ranks=1 if has_gpu else ranks)
    if options.inside is None:
        cluster_options["inside"] = _measure_inside(ranks, torch.cuda.device_count() if has_gpu else None)
    return make_cluster(device, **cluster_options)


def _measure_inside(ranks: int, num_gpus: int | None) -> Link | None:
    """Measure the link between the ranks of a host, as many as this machine has GPUs; None if it takes two.

    Args:
        ranks: number of ranks of a host.
        num_gpus: number of GPUs of this machine; None if it has none, and ranks compute on its cores.
    """
    from sparkdl.planner.measure import measure_link

    here = ranks if num_gpus is None else min(ranks, num_gpus)
    if here == 1 < ranks:
        print(
            "This machine has one GPU, and measuring the link between GPUs takes two: the plan has that of the table. "
            "--inside names another."
        )
    elif here < ranks:
        print(f"The link between the {ranks} GPUs of a host is measured between the {here} of this machine.")
    if here == 1:
        return None
    try:
        return measure_link(here, on_gpus=num_gpus is not None)
    except RankError as error:
        raise RankError(
            f"The link between {here} ranks could not be measured. To plan without a measurement, name the link with "
            f"--inside. {error}",
            rank=error.rank,
            host=error.host,
            traceback_text=error.traceback_text,
        ) from error


def _write(options: argparse.Namespace, content: object) -> None:
    if options.json is not None:
        options.json.write_text(json.dumps(content, indent=1) + "\n")
