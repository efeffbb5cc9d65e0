"""The ``sparkdl`` command and the table of its subcommands. Runs on the *driver*.

Begin with :func:`main`; each subcommand is a module here or the ``command`` of its package.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from sparkdl import __version__
from sparkdl.bench import allreduce, feed, fit, link, parallel, scaling, step, transform
from sparkdl.cli import demo, run
from sparkdl.doctor import command as doctor
from sparkdl.errors import ParamError, SparkdlError
from sparkdl.jobs import command as jobs
from sparkdl.monitor import top
from sparkdl.planner import command as planner

_COMMANDS = {
    "demo": (demo.add_arguments, demo.run, "train, track and serve a digit classifier on this machine"),
    "run": (run.add_arguments, run.run, "run a program on several ranks of this machine"),
    "doctor": (
        doctor.add_arguments,
        doctor.run,
        "check this machine or a cluster, and say what will not work and how to fix it",
    ),
    "plan": (planner.add_arguments, planner.run, "plan the parallelism of a model on a cluster"),
    "top": (top.add_arguments, top.run, "show the monitored fits and runs of this machine while they run"),
    "train": (jobs.add_arguments, jobs.train, "train the model that a job file describes"),
    "job-script": (
        None,
        jobs.print_script_path,
        "print the path of the program that spark-submit runs for jobs",
    ),
}

_BENCHMARKS = {
    "allreduce": (allreduce, "time an allreduce against Gloo, MPI and Horovod"),
    "step": (step, "time a training step against Gloo and Horovod"),
    "scaling": (scaling, "time one job on more and more ranks, by how they share the work"),
    "link": (link, "time training steps on two hosts with a slow link, by how ranks use it"),
    "parallel": (
        parallel,
        "time a training step under each kind of parallelism against Gloo and one process",
    ),
    "feed": (feed, "time reading Parquet against Petastorm, pyarrow and torch"),
    "transform": (transform, "time predictions against Spark's predict_batch_udf"),
    "fit": (fit, "time a whole fit against TorchDistributor and Horovod's estimator"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status.

    It is the status of the subcommand, 0 on success; 1 after an error of sparkdl, 2 after wrong usage, 130 on Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except SparkdlError as error:
        print(f"sparkdl: {error}", file=sys.stderr)
        return 2 if isinstance(error, ParamError) else 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sparkdl", description="Train PyTorch models on a Spark cluster.")
    parser.add_argument("--version", action="version", version=f"sparkdl {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (add_arguments, run_command, text) in _COMMANDS.items():
        _add(commands.add_parser(name, help=text), add_arguments, run_command)
    bench = commands.add_parser("bench", help="measure this machine against other libraries")
    benchmarks = bench.add_subparsers(title="benchmarks", required=True, metavar="NAME")
    for name, (module, text) in _BENCHMARKS.items():
        _add(benchmarks.add_parser(name, help=text), module.add_arguments, module.run)
    return parser


def _add(
    command: argparse.ArgumentParser,
    add_arguments: Callable[[argparse.ArgumentParser], None] | None,
    run_command: Callable[[argparse.Namespace], int],
) -> None:
    if add_arguments is not None:
        add_arguments(command)
    command.set_defaults(run=run_command)
