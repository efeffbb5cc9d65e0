"""``sparkdl run`` with ranks that come and go: ``--min``, ``--max`` and ``--join``."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sparkdl.checks import check_counts
from sparkdl.errors import ParamError, RankError
from sparkdl.launch.elastic.offers import LEAVE_TIMEOUT_S, Invitation
from sparkdl.launch.elastic.roster import MAX_RESTARTS, ElasticLimits
from sparkdl.launch.local_launch import has_gpus, offer_local_slots, run_on_local_ranks
from sparkdl.launch.rank.environment import variables_of_programs
from sparkdl.rendezvous.addresses import LISTEN, LOOPBACK, reachable_hosts
from sparkdl.runner.on_rank import IMPORTED_FIRST, RankSetup, Returned, run_on_rank
from sparkdl.runner.rank_logging import line_reader
from sparkdl.runner.script import Script, read_script

_DEFAULT_RANKS = 2


def run(options: argparse.Namespace) -> tuple[int, int]:
    """Run a script on ranks that come and go.

    Returns:
        The exit status, and the number of ranks that have ended without having connected to each other.

    Raises:
        ParamError: if the bounds contradict each other, or the command is not a Python script.
        RankError: if code on a rank raises, or too many ranks are lost.
    """
    limits = _limits(options)
    num_ranks = limits.own_slots or 1
    script = _script(options.command)
    setup = RankSetup(
        returns_all=False,
        gpus=0,
        operation_timeout_s=options.timeout,
        init_torch=False,
        max_restarts=limits.max_restarts,
    )
    is_open = bool(os.environ.get(LISTEN))
    with tempfile.TemporaryDirectory(prefix="sparkdl-run-") as folder:
        path = Path(folder, "join")

        def invite(invitation: Invitation) -> None:
            invitation.write(path)
            where = (
                "other terminals, and machines with a copy of this file," if is_open else "other terminals"
            )
            print(
                f"sparkdl: {where} add ranks by: sparkdl run --join {path} -n 1", file=sys.stderr, flush=True
            )

        try:
            returned: list[Returned | None] = run_on_local_ranks(
                run_on_rank,
                setup,
                script,
                num_ranks=num_ranks,
                transport=options.transport,
                wire=options.wire,
                threads_per_rank=options.threads,
                environment=variables_of_programs(),
                modules=() if has_gpus() else IMPORTED_FIRST,
                operation_timeout_s=options.timeout,
                on_log=line_reader(_print_line, only_for_driver=False),
                elastic=limits,
                hosts=reachable_hosts() if is_open else (LOOPBACK,),
                on_open=invite,
            )
        except RankError as error:
            return _report(error), 0
    have_met = len(returned) == 1 or any(outcome is None or outcome.has_met for outcome in returned)
    return 0, 0 if have_met else len(returned)


def join(options: argparse.Namespace) -> int:
    """Add ranks to an elastic run, and return the exit status once it is over or they have left.

    Raises:
        ParamError: if an option has no meaning for ranks that join, or the file is not that of a run.
        LaunchError: if the run cannot be reached.
    """
    for name, value in (("--min", options.least), ("--max", options.most)):
        if value is not None:
            raise ParamError(f"{name} is chosen where the run was begun: leave it out with --join.")
    if options.command:
        raise ParamError(
            f"The run sends its own script to ranks that join: leave out {options.command[0]!r}."
        )
    offer = offer_local_slots(
        Invitation.read(options.join),
        num_ranks=_DEFAULT_RANKS if options.ranks is None else options.ranks,
        threads_per_rank=options.threads,
        environment=variables_of_programs(),
        max_restarts=_max_restarts(options),
    )

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def leave(*_: object) -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        print(
            f"sparkdl: leaving the run after the next commit, or after {LEAVE_TIMEOUT_S:.0f} s. Press Ctrl-C again to "
            "leave at once.",
            file=sys.stderr,
            flush=True,
        )
        offer.leave()

    for number in handlers:
        signal.signal(number, leave)
    offer.run()
    return 0


def _limits(options: argparse.Namespace) -> ElasticLimits:
    least = 1 if options.least is None else options.least
    num_ranks = options.ranks
    if num_ranks is None:
        num_ranks = max(least, _DEFAULT_RANKS)
        num_ranks = num_ranks if options.most is None else min(num_ranks, options.most)
    most = num_ranks if options.most is None else options.most
    if not 1 <= least <= num_ranks <= most:
        raise ParamError(
            f"-n {num_ranks} has to be between --min {least} and --max {most}, and --min at least 1."
        )
    return ElasticLimits(least=least, most=most, max_restarts=_max_restarts(options), own_slots=num_ranks)


def _max_restarts(options: argparse.Namespace) -> int:
    if options.max_restarts is None:
        return MAX_RESTARTS
    check_counts(least=0, **{"--max-restarts": options.max_restarts})
    return int(options.max_restarts)


def _script(command: Sequence[str]) -> Script:
    """The script of a command, which may begin with the Python of this process.

    Raises:
        ParamError: if the command is anything else, or the script cannot be read.
    """
    words = list(command[1:] if command[:1] == ["--"] else command)
    program = Path(shutil.which(words[0]) or "") if words else Path()
    if program.parent == Path(sys.executable).parent and program.name.startswith("python"):
        words = words[1:]
    if not words or not words[0].endswith(".py"):
        raise ParamError(
            f"An elastic run takes a script that runs in {sys.executable}, as in: sparkdl run --min 1 --max 4 -- "
            f"train.py --epochs 3, and not {' '.join(words) or 'nothing'!r}: its ranks run it again, in the same "
            "processes, when others come or go."
        )
    return read_script(words[0], words[1:], {})


def _print_line(member: int, line: str, level: int | None) -> None:
    print(f"[member {member}] {line}", file=sys.stdout if level is None else sys.stderr, flush=True)


def _report(error: RankError) -> int:
    """Print the error of a rank, and return the status with which its script has exited, or 1."""
    print(f"sparkdl: {error}", file=sys.stderr)
    cause = error.__cause__
    code = cause.code if isinstance(cause, SystemExit) else None
    return code if isinstance(code, int) and code else 1
