"""``horovod.run``: runs a function on ranks that are processes of this machine, as Horovod's own function does.

What the entries of Horovod have in common stands here too; :mod:`sparkdl.horovod.spark` runs functions on a cluster.
The signatures are those of Horovod 0.28.1.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from sparkdl.errors import ParamError
from sparkdl.runner.horovod_runner import run_for_horovod

_THIS_MACHINE = {"localhost", "127.0.0.1"}


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    prefix_output_with_timestamp: bool = False,
) -> list[Any]:
    """Run ``func(*args, **kwargs)`` in processes of this machine, and return the value of each, in order of rank.

    With ``min_num_proc`` or ``max_num_proc`` the run is elastic: it continues without ranks that are lost, and others
    are started in their place.

    Args:
        func: function to run; it begins with ``hvd.init()``. It is pickled with cloudpickle, as are its arguments.
        args: positional arguments of the function.
        kwargs: keyword arguments of the function.
        num_proc: number of ranks.
        min_num_proc: minimum number of ranks of an elastic run; ``num_proc`` when None.
        max_num_proc: maximum number of ranks of an elastic run; ``slots`` or ``num_proc`` when None.
        slots: number of ranks that this machine can have.
        reset_limit: refused; :class:`sparkdl.Runner` has ``max_restarts``.
        cooldown_range: no effect, as there is one host.
        hosts: None, or this machine, such as ``localhost:2``.
        hostfile: refused, as there is one host.
        start_timeout: no effect: the ranks start at once.
        ssh_port: refused, as there is one host.
        ssh_identity_file: refused, as there is one host.
        disable_cache: no effect.
        output_filename: refused; lines are printed after the number of their rank.
        verbose: no effect.
        use_gloo: no effect: sparkdl chooses the transport.
        use_mpi: no effect: sparkdl chooses the transport.
        mpi_args: refused, as there is no mpirun.
        network_interface: refused, as there is one host.
        executable: refused; ranks run in the Python of this process.
        np: older name of ``num_proc``.
        min_np: older name of ``min_num_proc``.
        max_np: older name of ``max_num_proc``.
        prefix_output_with_timestamp: whether lines that ranks print begin with the time.

    Raises:
        ParamError: if an argument names other hosts, or has no meaning here; the message says what to use.
        SerializationError: if the function or its arguments cannot be pickled; the message names them.
        RankError: if a rank fails; the error names the first failed rank, and ``__cause__`` is its exception.
    """
    names = [host.partition(":")[0] for host in hosts.split(",")] if hosts is not None else []
    refuse(
        "horovod.run",
        {
            "hosts": hosts if set(names) - _THIS_MACHINE else None,
            "hostfile": hostfile,
            "ssh_port": ssh_port,
            "ssh_identity_file": ssh_identity_file,
            "network_interface": network_interface,
        },
        "It runs ranks on this machine. For several machines use sparkdl.horovod.spark.run or sparkdl.Runner.",
    )
    refuse("horovod.run", {"mpi_args": mpi_args}, NO_MPI)
    refuse("horovod.run", {"executable": executable}, SAME_PYTHON)
    refuse("horovod.run", {"output_filename": output_filename}, "Redirect the output of this process.")
    refuse("horovod.run", {"reset_limit": reset_limit}, NO_RESET_LIMIT)
    refuse_both_transports(use_mpi=use_mpi, use_gloo=use_gloo)
    num_ranks = np if np is not None and num_proc == 1 else num_proc
    least = min_np if min_num_proc is None else min_num_proc
    most = max_np if max_num_proc is None else max_num_proc
    if slots is not None and slots < num_ranks:
        raise ParamError(f"slots={slots} are too few for num_proc={num_ranks} ranks on this machine.")
    limits: dict[str, Any] = {}
    if least is not None or most is not None:
        limits = elastic_limits(num_ranks, least, slots if most is None else most)
    return run_for_horovod(
        func,
        tuple(args),
        dict(kwargs or {}),
        num_workers=num_ranks,
        local=True,
        on_log=printer(None, None, with_time=prefix_output_with_timestamp),
        **limits,
    )


NO_MPI = "sparkdl starts no mpirun: leave it out."
SAME_PYTHON = "Ranks run in the Python of this process: leave it out."
NO_RESET_LIMIT = (
    "sparkdl does not count changes of the world. To limit how many lost ranks are started again, use "
    "sparkdl.Runner(elastic=True, max_restarts=...)."
)


def elastic_limits(num_ranks: int, least: int | None, most: int | None) -> dict[str, Any]:
    """The options of a Runner for an elastic run; both bounds are the number of ranks by default, as in Horovod.

    Raises:
        ParamError: if the bounds contradict each other.
    """
    least = num_ranks if least is None else least
    most = num_ranks if most is None else most
    if not 1 <= least <= num_ranks <= most:
        raise ParamError(
            f"num_proc={num_ranks} has to be between min_num_proc={least} and max_num_proc={most}, and min_num_proc at "
            "least 1."
        )
    return {"elastic": True, "min_workers": least, "max_workers": most}


def refuse(function: str, arguments: Mapping[str, Any], remedy: str) -> None:
    """Refuse arguments of Horovod that are not None and have no meaning here.

    Raises:
        ParamError: if there is one; the message ends with ``remedy``.
    """
    refused = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value is not None)
    if refused:
        raise ParamError(f"{function} of sparkdl does not take {refused}. {remedy}")


def refuse_both_transports(*, use_mpi: bool | None, use_gloo: bool | None) -> None:
    """Refuse a choice of both of Horovod's transports; a choice of one of them has no effect.

    Raises:
        ParamError: if both are chosen.
    """
    if use_mpi and use_gloo:
        raise ParamError(
            "use_mpi and use_gloo cannot both be True. Leave both out: sparkdl chooses the transport."
        )


def printer(
    stdout: IO[str] | None, stderr: IO[str] | None, *, with_time: bool
) -> Callable[[int, str, int | None], None] | None:
    """Return a function that prints the lines of ranks as Horovod does; None for the way in which a Runner prints them.

    Args:
        stdout: stream for lines that ranks print; ``sys.stdout`` when None.
        stderr: stream for the records of Python's logging; ``sys.stderr`` when None.
        with_time: whether lines begin with the time.
    """
    if stdout is None and stderr is None and not with_time:
        return None

    def print_line(rank: int, line: str, level: int | None) -> None:
        time_ = time.strftime("%a %b %d %H:%M:%S %Y") if with_time else ""
        if level is None:
            print(f"{time_}[{rank}]<stdout>:{line}", file=stdout or sys.stdout, flush=True)
        else:
            print(f"{time_}[{rank}]<stderr>:{line}", file=stderr or sys.stderr, flush=True)

    return print_line
