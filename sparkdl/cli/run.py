"""``sparkdl run``: runs a program on several ranks on this machine, without Spark."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from subprocess import CalledProcessError
from typing import TYPE_CHECKING, NoReturn

from sparkdl.checks import check_counts
from sparkdl.collective import TRANSPORTS, WIRES, check_timeout
from sparkdl.collective.job import TIMEOUT_S, TRANSPORT, WIRE
from sparkdl.collective.torchrun_variables import variables_of_slurm
from sparkdl.cores import thread_variables, threads_of_local_rank
from sparkdl.errors import LaunchError, ParamError, RankError
from sparkdl.launch.local_launch import run_program_on_local_ranks
from sparkdl.launch.rank.environment import ALLOCATOR_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Mapping

_DESCRIPTION = """\
Starts COMMAND once for each rank on this machine, and prefixes its output with the number of the rank. A COMMAND that
begins with a file *.py is run by the Python of this command. When a rank fails, all are ended, and its exit status is
that of this command; it is 127 if COMMAND is not found.

Scripts for torchrun run unchanged: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on are set. Ranks connect by
torch.distributed.init_process_group(), also if a Trainer calls it, with the backend "sparkdl", which is the native
core, or "gloo", which CPUs have without an argument; and by sparkdl.torch.init_process_group(), hvd.init() and
sparkdl.collective.current_communicator(). If no rank calls any of these, a warning says so at the end.

OMP_NUM_THREADS is set to --threads, or to each rank's share of the cores unless it is set already.

With --min or --max the run is elastic: it continues without ranks that are lost, as long as --min are left, and starts
others in their place. COMMAND is then a Python script. A script that has a sparkdl.runner.TrainingState, or whose
training is decorated with hvd.elastic.run, continues with its last commit on the ranks that are left; any other script
starts from the beginning on all ranks.

An elastic run prints how other terminals and machines add ranks by --join, up to --max. They come after a commit, and
leave after one when their `sparkdl run --join` gets Ctrl-C or SIGTERM. Only this machine can add ranks unless
SPARKDL_LISTEN says where others reach it: addresses, networks or interfaces, or all.

As one of several tasks of SLURM's srun, and without -n, this command is one rank: it sets the variables of torchrun
from those of SLURM, and becomes COMMAND.
"""

_UNCONNECTED = (
    "sparkdl: warning: no rank opened the communicator or initialized torch.distributed with other ranks. If this "
    "program trains a model and does not connect its ranks itself, as by a TCPStore of its own, its {0} ranks trained "
    "{0} unconnected models: call torch.distributed.init_process_group() in it, or another of the functions that "
    "`sparkdl run --help` names."
)

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

_NOT_LOADED = (
    f"sparkdl: because of {_AUTOLOAD}=0 torch did not load sparkdl.torch, which connects ranks. If "
    "init_process_group() failed, set it to 1, or import sparkdl.torch in the program."
)

_BROKEN_PIPE = 128 + signal.SIGPIPE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.description = _DESCRIPTION
    parser.usage = (
        "sparkdl run [-h] [-n RANKS] [--threads THREADS] [--transport ...] [--wire ...] [--timeout SECONDS] "
        "[--min RANKS] [--max RANKS] [--max-restarts N] [--] COMMAND ...\n"
        "       sparkdl run --join FILE [-n RANKS] [--threads THREADS] [--max-restarts N]"
    )
    parser.add_argument(
        "-n", "--ranks", type=int, help="how many ranks on this machine (default: 2, within --min and --max)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        help="threads of each rank (default: $OMP_NUM_THREADS or its share of the cores)",
    )
    parser.add_argument(
        "--transport",
        choices=TRANSPORTS,
        default=os.environ.get(TRANSPORT) or "auto",
        help=f"transport of their communicator (default: ${TRANSPORT} or auto)",
    )
    parser.add_argument(
        "--wire",
        choices=WIRES,
        default=os.environ.get(WIRE) or "float32",
        help=f"data type for sums of float32 over TCP (default: ${WIRE} or float32)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=os.environ.get(TIMEOUT_S) or "300",
        metavar="SECONDS",
        help=f"for connecting the ranks, and default deadline of a collective (default: ${TIMEOUT_S} or 300)",
    )
    elastic = parser.add_argument_group("ranks that come and go")
    elastic.add_argument("--min", type=int, dest="least", metavar="RANKS", help="least number (default: 1)")
    elastic.add_argument(
        "--max",
        type=int,
        dest="most",
        metavar="RANKS",
        help="greatest number, with those that join (default: -n)",
    )
    elastic.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="how many ranks are started on this machine in place of others (default: 100)",
    )
    elastic.add_argument(
        "--join", type=Path, metavar="FILE", help="add ranks to the run that has printed this name of a file"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="such as: python script.py"
    )


def run(options: argparse.Namespace) -> int:
    """Run the ranks and return the exit status.

    It is 0, or the status of the failed rank: 128 plus the number of the signal if a signal ended the rank; 127 or 126
    if the program does not exist or may not be run.

    Raises:
        ParamError: if an option has a value that cannot work.
        LaunchError: if the ranks cannot be started for another reason.
        RankError: if code on a rank of an elastic run raises.
    """
    # SIGTERM also ends the ranks by SIGTERM.
    signal.signal(signal.SIGTERM, _leave)
    check_timeout(options.timeout, "--timeout")
    try:
        if options.join is not None or options.least is not None or options.most is not None:
            return _run_elastically(options)
        return _run_together(options)
    except LaunchError as error:
        if not isinstance(error.__cause__, (FileNotFoundError, PermissionError)):
            raise
        print(f"sparkdl: {error}", file=sys.stderr)
        return 127 if isinstance(error.__cause__, FileNotFoundError) else 126  # as shells do
    except BrokenPipeError:
        # Otherwise the interpreter would report an error when it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def _run_together(options: argparse.Namespace) -> int:
    if options.max_restarts is not None:
        raise ParamError("--max-restarts is for ranks that come and go: give --min or --max as well.")
    slurm = variables_of_slurm(os.environ) if options.ranks is None else {}
    num_ranks = 2 if options.ranks is None else options.ranks
    check_counts(least=1, **{"--ranks": num_ranks})
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        print(
            "sparkdl run: a command is missing, as in: sparkdl run -n 2 -- python script.py", file=sys.stderr
        )
        return 2
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    if slurm:
        _become_rank(command, options, slurm)
    have_met, lock = threading.Event(), threading.Lock()
    streams = {1: sys.stdout.buffer, 2: sys.stderr.buffer}

    def print_line(rank: int, stream: int, line: bytes) -> None:
        text = line if line.endswith(b"\n") else line + b"\n"
        with lock:  # lines of ranks are printed as a whole
            streams[stream].write(f"[rank {rank}] ".encode() + text)
            streams[stream].flush()

    try:
        run_program_on_local_ranks(
            command,
            num_ranks=num_ranks,
            transport=options.transport,
            wire=options.wire,
            timeout_s=options.timeout,
            threads_per_rank=options.threads,
            on_line=print_line,
            on_met=have_met.set,
        )
    except RankError as error:
        cause = error.__cause__
        if isinstance(cause, OSError):  # of print_line
            raise cause from error
        if not have_met.is_set() and os.environ.get(_AUTOLOAD, "1") != "1":
            print(_NOT_LOADED, file=sys.stderr)
        print(f"sparkdl: {error}", file=sys.stderr)
        status = cause.returncode if isinstance(cause, CalledProcessError) else 1
        return status if status > 0 else 128 - status
    if num_ranks > 1 and not have_met.is_set():
        print(_UNCONNECTED.format(num_ranks), file=sys.stderr)
    return 0


def _become_rank(command: list[str], options: argparse.Namespace, variables: Mapping[str, str]) -> NoReturn:
    """Replace this process by the rank of a task of SLURM, whose srun ends the others if it fails."""
    threads = options.threads or threads_of_local_rank(int(variables["LOCAL_WORLD_SIZE"]))
    choices = {TRANSPORT: options.transport, WIRE: options.wire, TIMEOUT_S: str(options.timeout)}
    try:
        os.execvpe(
            command[0],
            command,
            {**ALLOCATOR_VARIABLES, **os.environ, **thread_variables(threads), **choices, **variables},
        )
    except OSError as error:
        raise LaunchError(f"The program {command[0]!r} cannot be started: {error.strerror}.") from error


def _run_elastically(options: argparse.Namespace) -> int:
    from sparkdl.cli import elastic_run  # imports what a plain run does not need

    if options.join is not None:
        return elastic_run.join(options)
    status, num_unconnected = elastic_run.run(options)
    if num_unconnected:
        print(_UNCONNECTED.format(num_unconnected), file=sys.stderr)
    return status


def _leave(number: int, _frame: object) -> None:
    sys.exit(128 + number)
