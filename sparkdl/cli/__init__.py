"""The ``sparkdl`` command: a table of its subcommands. Each lives in a module of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sparkdl import __version__
from sparkdl.bench import allreduce, feed, fit, step, transform
from sparkdl.cli import demo, run
from sparkdl.doctor import command as doctor
from sparkdl.errors import ParamError, SparkdlError
from sparkdl.jobs import command as jobs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit status is 0 on success, 1 on an error of ours, 2 on wrong usage."""
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

    command = commands.add_parser("demo", help="train, track and serve a digit classifier on this machine")
    demo.add_arguments(command)
    command.set_defaults(run=demo.run)

    command = commands.add_parser("run", help="run a program on several ranks of this machine")
    run.add_arguments(command)
    command.set_defaults(run=run.run)

    command = commands.add_parser(
        "doctor", help="check this machine or a cluster, and say what will not work and how to mend it"
    )
    doctor.add_arguments(command)
    command.set_defaults(run=doctor.run)

    command = commands.add_parser("train", help="train the model that a job file describes")
    jobs.add_arguments(command)
    command.set_defaults(run=jobs.train)

    command = commands.add_parser(
        "job-script", help="print the path of the program that spark-submit runs for jobs"
    )
    command.set_defaults(run=jobs.print_script_path)

    bench = commands.add_parser("bench", help="measure this machine against other libraries")
    benchmarks = bench.add_subparsers(title="benchmarks", required=True, metavar="NAME")
    command = benchmarks.add_parser("allreduce", help="time an allreduce against Gloo, MPI and Horovod")
    allreduce.add_arguments(command)
    command.set_defaults(run=allreduce.run)
    command = benchmarks.add_parser("step", help="time a training step against Gloo and Horovod")
    step.add_arguments(command)
    command.set_defaults(run=step.run)
    command = benchmarks.add_parser("feed", help="time reading Parquet against Petastorm, pyarrow and torch")
    feed.add_arguments(command)
    command.set_defaults(run=feed.run)
    command = benchmarks.add_parser("transform", help="time predictions against Spark's predict_batch_udf")
    transform.add_arguments(command)
    command.set_defaults(run=transform.run)
    command = benchmarks.add_parser(
        "fit", help="time a whole fit against TorchDistributor and Horovod's estimator"
    )
    fit.add_arguments(command)
    command.set_defaults(run=fit.run)
    return parser
