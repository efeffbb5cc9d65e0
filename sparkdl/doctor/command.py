"""``sparkdl doctor``: reports what will not work on this machine or cluster, and how to fix it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from sparkdl.checks import check_counts
from sparkdl.data.files.filesystems import local_path
from sparkdl.doctor.examination import HERE, examine
from sparkdl.doctor.finding import BAD, Finding, as_table, is_healthy
from sparkdl.errors import LaunchError, ParamError
from sparkdl.spark.failures import spark_words

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SESSION_THREAD = "sparkdl-session"

_DESCRIPTION = """\
Checks Python, Java, packages, shared memory, GPUs, NCCL and MPI of this machine; with --master or --remote also of
every executor, and which of their interfaces reach each other, and at what rate. Says what will not work and how to
fix it. The exit status is 1 if something will not work.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.description = _DESCRIPTION
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--master",
        metavar="URL",
        help="of a cluster, as spark-submit takes it: local[2], spark://host:7077, yarn",
    )
    where.add_argument("--remote", metavar="URL", help="of a Spark Connect server: sc://host:15002")
    parser.add_argument(
        "--conf",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of Spark; may be given again",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="how many are to run at once (default: all slots)"
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="for each check (default: %(default)g)"
    )
    parser.add_argument("--json", type=local_path, metavar="FILE", help="write the findings there, too")


def run(options: argparse.Namespace) -> int:
    """Run the checks, print the table, and return the exit status: 1 if something will not work, else 0.

    Raises:
        ParamError: if an option has a value that cannot work.
    """
    if options.ranks is not None:
        check_counts(least=1, **{"--ranks": options.ranks})
    if not options.timeout > 0:
        raise ParamError(f"--timeout must be positive, got {options.timeout:g}")
    if options.json is not None and not os.access(options.json.absolute().parent, os.W_OK):
        raise ParamError(f"--json {options.json}: its folder is not there, or cannot be written to.")
    settings = _settings(options.conf)
    with ExitStack() as stack:
        findings = _examine(options, settings, stack)
    width = shutil.get_terminal_size((120, 24)).columns
    has_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(as_table(findings, width=width, has_colours=has_colours))
    if options.json is not None:
        content = {"is_healthy": is_healthy(findings), "findings": [asdict(finding) for finding in findings]}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    status = 0 if is_healthy(findings) else 1
    if any(thread.name == _SESSION_THREAD for thread in threading.enumerate()):
        # Threads that still wait for the server, including those of gRPC, would delay the exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _settings(given: list[str]) -> dict[str, str]:
    settings = {}
    for setting in given:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ParamError(f"--conf takes KEY=VALUE, got {setting!r}")
        settings[key] = value
    return settings


def _examine(options: argparse.Namespace, settings: dict[str, str], stack: ExitStack) -> list[Finding]:
    spark = None
    if options.master or options.remote:
        _say("Starting Spark")
        try:
            spark = _within(options.timeout, lambda: _session(options, settings, stack))
        except Exception as error:  # one of Spark, py4j or gRPC
            findings = examine(num_ranks=options.ranks, timeout_s=options.timeout, on_step=_say)
            problem = f"no session on {options.master or options.remote}: {spark_words(error)}"
            advice = "Look at the URL, at whether the server runs, and at Java and pyspark above."
            return [*findings, Finding(check="Spark", where=HERE, status=BAD, found=problem, advice=advice)]
    return examine(spark, num_ranks=options.ranks, timeout_s=options.timeout, on_step=_say)


def _within(timeout_s: float, start: Callable[[], SparkSession]) -> SparkSession:
    """Call ``start`` and return the session; raise after a timeout, as the call may wait for a server for minutes."""
    session: Future[SparkSession] = Future()

    def run() -> None:
        try:
            session.set_result(start())
        except Exception as error:
            session.set_exception(error)

    threading.Thread(target=run, name=_SESSION_THREAD, daemon=True).start()
    if not wait([session], timeout_s).done:
        raise LaunchError(f"there was no answer within {timeout_s:g} s (--timeout)")
    return session.result()


def _session(options: argparse.Namespace, settings: dict[str, str], stack: ExitStack) -> SparkSession:
    from pyspark.sql import SparkSession

    from sparkdl.cli.local_session import spark_options, use_own_spark

    builder = SparkSession.builder.appName("sparkdl doctor")
    if options.remote:
        builder = builder.remote(options.remote)
    else:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="sparkdl-doctor-")))
        if options.master.startswith("local"):
            use_own_spark()
        builder = builder.master(options.master)
        settings = {
            **spark_options(options.master, folder),
            "spark.sql.warehouse.dir": str(folder / "spark-warehouse"),
            **settings,
        }
    session: SparkSession = builder.config(map={**settings}).getOrCreate()
    stack.callback(session.stop)
    return session


def _say(step: str) -> None:
    print(f"{step} ...", file=sys.stderr, flush=True)
