"""``sparkdl train`` and ``predict``, and ``sparkdl_job.py`` for spark-submit: the same command line, other sessions.

The exit code of a job's process says whether a scheduler should run the job again:

=====  =================================================================================================
code   meaning
=====  =================================================================================================
0      done, also if an equal job had been done before
1      failed, and would fail again: fix data, model or code; also if ranks hang because they call operations
       in different orders, or because one reports no progress
2      the command line or the job file is wrong; nothing was started
75     lost ranks, executors, slots or the cluster (``EX_TEMPFAIL`` of sysexits.h), or any other hang: a
       process or host that does not answer, a rank that others waited for. Run it again
130    ended by SIGINT, Ctrl-C
143    ended by SIGTERM
=====  =================================================================================================

SIGTERM ends a job as Ctrl-C does, and so does the end of spark-submit.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sparkdl.errors import (
    CheckpointsInUseError,
    HangError,
    JobFileError,
    ParamError,
    ProcessesLostError,
    SlotsMissingError,
    SparkdlError,
)
from sparkdl.foreign_errors import how_to_install

DONE = 0
FAILED = 1
WRONG_USAGE = 2
TRY_AGAIN = os.EX_TEMPFAIL
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

_TEMPORARY = (ProcessesLostError, SlotsMissingError, CheckpointsInUseError)


class Terminated(KeyboardInterrupt):
    """SIGTERM was received; it ends a fit as Ctrl-C does."""


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends with this exception."""
    if isinstance(error, Terminated):
        return TERMINATED
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, HangError) and error.is_in_code:
        return FAILED
    if isinstance(error, _TEMPORARY):
        return TRY_AGAIN
    return WRONG_USAGE if isinstance(error, ParamError) else FAILED


_DESCRIPTION = """\
Trains the model of a job file, and writes it with its result to the job's output. A finished job is not repeated. The
exit code is 0 when done, 1 if it failed, 2 if the job or the command line is wrong, 75 if ranks, slots or the cluster
were lost and the job should be run again, 130 on Ctrl-C and 143 on SIGTERM.
"""


_DESCRIPTION_OF_PREDICT = """\
Predicts the rows that the section predict of a job file names, with the model in the job's output or with a logged one,
and writes them with their predictions. Exit codes are those of train.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``sparkdl train``."""
    parser.description = _DESCRIPTION
    parser.usage = f"{parser.prog} [-h] [--dry-run] [--again] JOB.yaml [KEY=VALUE ...]"
    _add_flags(parser)
    _add_job(parser)


def add_prediction_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``sparkdl predict``."""
    parser.description = _DESCRIPTION_OF_PREDICT
    parser.usage = f"{parser.prog} [-h] JOB.yaml [KEY=VALUE ...]"
    _add_job(parser)


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", type=Path, metavar="JOB.yaml", help="the job file")
    parser.add_argument(
        "others",
        nargs=argparse.REMAINDER,
        metavar="KEY=VALUE",
        help="values that replace those of the file: epochs=3, model.arguments.hidden=64",
    )
    parser.set_defaults(prog=parser.prog, usage=parser.usage)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan; ranks start, and nothing is trained"
    )
    parser.add_argument(
        "--again", action="store_true", help="train even if the job is done, and replace the output"
    )


def _after_job(options: argparse.Namespace) -> argparse.Namespace:
    """Parse the arguments after the job file: values and options in any order, which argparse lacks for subcommands."""
    parser = argparse.ArgumentParser(prog=options.prog, usage=options.usage)
    _add_flags(parser)
    parser.add_argument("overrides", nargs="*")
    parsed = parser.parse_intermixed_args(options.others)
    parsed.dry_run |= options.dry_run
    parsed.again |= options.again
    return parsed


def run_submitted() -> int:
    """Run ``sparkdl_job.py``: train, or predict after ``--predict``, in the Spark session of spark-submit."""
    parser = argparse.ArgumentParser(prog="sparkdl_job.py")
    predicts = "--predict" in sys.argv[1:2]
    if predicts:
        del sys.argv[1]
    (add_prediction_arguments if predicts else add_arguments)(parser)
    options = parser.parse_args()
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        end_with_parent()
    return (predict if predicts else train)(options, is_submitted=True)


def print_script_path(_options: argparse.Namespace) -> int:
    """Run ``sparkdl job-script``: print the path of the program for spark-submit."""
    print(Path(__file__).parent / "script" / "sparkdl_job.py")
    return DONE


def train(options: argparse.Namespace, *, is_submitted: bool = False) -> int:
    """Run ``sparkdl train``: train in a Spark session of its own, or in that of spark-submit."""
    others = _after_job(options)

    def read() -> Any:
        from sparkdl.jobs.job import read_job
        from sparkdl.jobs.yaml_tree import read_override

        return read_job(options.job, [read_override(argument) for argument in others.overrides])

    def run(job: Any) -> None:
        from sparkdl.jobs.run_job import run_job

        run_job(
            job,
            _session_of(job, is_submitted=is_submitted),
            say=partial(print, flush=True),
            is_again=others.again,
            is_dry_run=others.dry_run,
            has_own_session=not is_submitted,
        )

    return _status_of(read, run)


def predict(options: argparse.Namespace, *, is_submitted: bool = False) -> int:
    """Run ``sparkdl predict``: predict in a Spark session of its own, or in that of spark-submit."""

    def read() -> Any:
        from sparkdl.jobs.job import read_prediction_job
        from sparkdl.jobs.yaml_tree import read_override

        return read_prediction_job(options.job, [read_override(argument) for argument in options.others])

    def run(job: Any) -> None:
        from sparkdl.jobs.predict import run_prediction

        run_prediction(job, _session_of(job, is_submitted=is_submitted), say=partial(print, flush=True))

    return _status_of(read, run)


def _session_of(job: Any, *, is_submitted: bool) -> Any:
    """Return the function that opens the session of a job."""
    from sparkdl.jobs.run_job import given_session, own_session

    name = f"sparkdl {job.file.stem}"
    return partial(given_session, name=name) if is_submitted else partial(own_session, job.spark, name=name)


def _status_of(read: Callable[[], Any], run: Callable[[Any], None]) -> int:
    """Read and run a job, print its error, and return the exit code."""
    log_format = "text"
    try:
        with ends_when_asked():
            _require_libraries()
            job = read()
            log_format = getattr(job, "log_format", log_format)  # a prediction has none
            run(job)
    except KeyboardInterrupt as error:
        return exit_code(error)
    except Exception as error:
        is_known = isinstance(error, SparkdlError)
        text = f"sparkdl: {error}" if is_known else traceback.format_exc().rstrip()
        if log_format == "json":
            from sparkdl.estimators.fit.progress import JsonProgress

            JsonProgress(sys.stderr).write("error", type=type(error).__name__, text=text)
        else:
            print(text, file=sys.stderr, flush=True)
        return exit_code(error)
    return DONE


def _require_libraries() -> None:
    needed = {
        "ruamel.yaml": "ruamel.yaml",
        "pyspark": "pyspark",
        "torch": "torch",
        "petastorm": "petastorm==0.12.1",
    }
    missing = [requirement for package, requirement in needed.items() if not _is_installed(package)]
    if missing:
        raise JobFileError(
            f"A job needs {', '.join(missing)}, which is not installed. {how_to_install('train', *missing)}"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@contextmanager
def ends_when_asked() -> Iterator[None]:
    """Raise :class:`Terminated` in the main thread on SIGTERM; a second SIGTERM is ignored."""
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_with_parent() -> None:
    """Send SIGTERM to this process when its parent ends, even by SIGKILL.

    If spark-submit is killed, it does not end its Python program.
    """
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGTERM)


def _raise(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated("SIGTERM")
