"""The ``sparkdl`` command and the table of its subcommands. Runs on the *driver*.

Begin with :func:`main`; each subcommand is a module here or one of a guest. Only the module of the chosen subcommand
is imported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from sparkdl import __version__
from sparkdl.errors import ParamError, SparkdlError
from sparkdl.lazy import load_entry

_OPTIONS, _RUN = "add_arguments", "run"
_COMMANDS = {
    "demo": (_OPTIONS, _RUN, "train, track and serve a digit classifier on this machine"),
    "run": (_OPTIONS, _RUN, "run a program on several ranks of this machine"),
    "doctor": (
        _OPTIONS,
        _RUN,
        "check this machine or a cluster, and say what will not work and how to fix it",
    ),
    "plan": (_OPTIONS, _RUN, "plan the parallelism of a model on a cluster"),
    "top": (_OPTIONS, _RUN, "show the monitored fits and runs of this machine while they run"),
    "train": (_OPTIONS, "train", "train the model that a job file describes"),
    "predict": (
        "add_prediction_arguments",
        "predict",
        "predict the rows of a job file with its model",
    ),
    "job-script": (
        None,
        "print_script_path",
        "print the path of the program that spark-submit runs for jobs",
    ),
    "job-schema": (None, "print_schema", "print the JSON Schema of job files, for editors"),
}
"""For each subcommand the functions that declare its options and run it, and what it is for.

:data:`sparkdl.lazy.ENTRIES` has the module of each.
"""

_BENCHMARKS = {
    "allreduce": "time an allreduce against Gloo, MPI and Horovod",
    "step": "time a training step against Gloo and Horovod",
    "scaling": "time one job on more and more ranks, by how they share the work",
    "link": "time training steps on two hosts with a slow link, by how ranks use it",
    "parallel": "time a training step under each kind of parallelism against Gloo and one process",
    "feed": "time reading Parquet against Petastorm, pyarrow and torch",
    "transform": "time predictions against Spark's predict_batch_udf",
    "launch": "time the start and end of ranks, with and without Spark",
    "fit": "time a whole fit against TorchDistributor and Horovod's estimator",
}
"""What each benchmark is for."""


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
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=_CommandParser
    )
    for name, (options, run, text) in _COMMANDS.items():
        _add_command(commands, name, text, entry=f"sparkdl {name}", options=options, run=run)
    bench = _add_command(commands, "bench", "measure this machine against other libraries, in one run")
    benchmarks = bench.add_subparsers(title="benchmarks", required=True, metavar="NAME")
    for name, text in _BENCHMARKS.items():
        _add_command(benchmarks, name, text, entry=f"sparkdl bench {name}", options=_OPTIONS, run=_RUN)
    return parser


def _add_command(commands: Any, name: str, text: str, **options: str | None) -> argparse.ArgumentParser:
    description = f"{text[0].upper()}{text[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=description, formatter_class=_Paragraphs, **options
    )
    return parser


class _Paragraphs(argparse.HelpFormatter):
    """Wraps each paragraph of a description by itself."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(fill(paragraph, width, indent) for paragraph in text.split("\n\n"))


class _CommandParser(argparse.ArgumentParser):
    """The parser of a subcommand; it imports the module of the subcommand when this is chosen.

    Args:
        entry: key of the module in :data:`sparkdl.lazy.ENTRIES`; None for a command that only has subcommands.
        options: name of the function that declares the options; None without options.
        run: name of the function that runs the subcommand.
        others: options of :class:`argparse.ArgumentParser`.
    """

    def __init__(
        self, *, entry: str | None = None, options: str | None = None, run: str = _RUN, **others: Any
    ) -> None:
        super().__init__(**others)
        self._entry, self._options, self._run = entry, options, run

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Declare the options of the subcommand, and parse them."""
        if self._entry is not None:
            try:
                module = load_entry(self._entry)
            except ImportError as error:
                if not str(error).startswith(self._entry):
                    raise  # of another package
                self.exit(1, f"sparkdl: {error}\n")
            if self._options is not None:
                getattr(module, self._options)(self)
            self.set_defaults(run=getattr(module, self._run))
        return super().parse_known_args(args, namespace)
