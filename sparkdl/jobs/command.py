"""``sparkdl train``, and ``sparkdl_job.py`` for spark-submit: one command line, two ways to a session."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.errors import JobFileError, SparkdlError
from sparkdl.jobs.exit_codes import DONE, exit_code

if TYPE_CHECKING:
    from sparkdl.jobs.job import Job
    from sparkdl.jobs.run_job import OpenSession

_DESCRIPTION = """\
Trains the model that a job file describes, and writes it with its result to the job's output. A job that is done is
not done again. Ends with 0 when done, 1 when it failed, 2 when the job or the command line is wrong, 75 when ranks,
slots or the cluster were lost and it is worth running again, 130 on Ctrl-C and 143 on SIGTERM.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.description = _DESCRIPTION
    parser.usage = f"{parser.prog} [-h] [--dry-run] [--again] JOB.yaml [KEY=VALUE ...]"
    _add_flags(parser)
    parser.add_argument("job", type=Path, metavar="JOB.yaml", help="the job file")
    parser.add_argument(
        "others",
        nargs=argparse.REMAINDER,
        metavar="KEY=VALUE",
        help="other values than in the file: epochs=3, model.arguments.hidden=64",
    )
    parser.set_defaults(prog=parser.prog, usage=parser.usage)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan; ranks start, and nothing is trained"
    )
    parser.add_argument(
        "--again", action="store_true", help="train also what is done, and replace the output"
    )


def _after_job(options: argparse.Namespace) -> argparse.Namespace:
    """Understand what follows the job's file: values and options in any order, which subcommands cannot have else."""
    parser = argparse.ArgumentParser(prog=options.prog, usage=options.usage)
    _add_flags(parser)
    parser.add_argument("overrides", nargs="*")
    found = parser.parse_intermixed_args(options.others)
    found.dry_run |= options.dry_run
    found.again |= options.again
    return found


def train(options: argparse.Namespace) -> int:
    """Run ``sparkdl train``: in a session of its own."""

    def own(job: Job) -> OpenSession:
        from sparkdl.jobs.session import own_session

        return lambda num_ranks: own_session(job.spark, name=_name(job), num_ranks=num_ranks)

    return _run(options, own)


def submitted(arguments: Sequence[str] | None = None) -> int:
    """Run ``sparkdl_job.py``: in the session that spark-submit has the settings for."""
    parser = argparse.ArgumentParser(prog="sparkdl_job.py")
    add_arguments(parser)
    options = parser.parse_args(arguments)

    def given(job: Job) -> OpenSession:
        from sparkdl.jobs.session import given_session

        return lambda _: given_session(name=_name(job))

    if "PYSPARK_GATEWAY_PORT" in os.environ:
        from sparkdl.jobs.signals import end_with_parent

        end_with_parent()
    return _run(options, given)


def print_script_path(_options: argparse.Namespace) -> int:
    """Run ``sparkdl job-script``: print where the program for spark-submit lies."""
    print(Path(__file__).parent / "script" / "sparkdl_job.py")
    return DONE


def _run(options: argparse.Namespace, session_of: Callable[[Job], OpenSession]) -> int:
    from sparkdl.jobs.signals import ends_when_asked

    others = _after_job(options)
    try:
        with ends_when_asked():
            _require_libraries()
            from sparkdl.jobs.job import read_job
            from sparkdl.jobs.overrides import read_override

            job = read_job(options.job, [read_override(each) for each in others.overrides])
            from sparkdl.jobs.run_job import run_job

            run_job(
                job,
                session_of(job),
                say=partial(print, flush=True),
                is_again=others.again,
                is_dry_run=others.dry_run,
            )
    except SparkdlError as error:
        print(f"sparkdl: {error}", file=sys.stderr, flush=True)
        return exit_code(error)
    except KeyboardInterrupt as error:
        return exit_code(error)
    except Exception as error:
        traceback.print_exc()
        return exit_code(error)
    return DONE


def _require_libraries() -> None:
    needed = {"yaml": "pyyaml", "pyspark": "pyspark", "torch": "torch", "petastorm": "petastorm"}
    missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise JobFileError(
            f"A job needs {', '.join(missing)}; install it with: pip install {' '.join(missing)}"
        )


def _name(job: Job) -> str:
    return f"sparkdl {job.file.stem}"
