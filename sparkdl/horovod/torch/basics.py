"""Horovod's basics: timeline, init, shutdown, rank and size with their local and cross forms, and build queries.

For the timeline see :meth:`sparkdl.collective.Communicator.start_timeline`. ``init`` opens communicators of its own;
the launcher's communicator stays open and belongs to the launcher. Horovod's build queries report on the corresponding
parts of sparkdl.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

import sparkdl.torch  # noqa: F401  # makes communicator_for understand torchrun's variables
from sparkdl.collective import Communicator, StallCheck
from sparkdl.collective.byte_exchange import allgather_bytes, broadcast_bytes
from sparkdl.collective.current import at_end, cancel_at_end, communicator_for, provided
from sparkdl.collective.nccl.opening import load_nccl
from sparkdl.errors import ParamError, TransportUnavailableError
from sparkdl.horovod.torch.current_session import begin_session, end_session, has_session, session
from sparkdl.horovod.torch.handles import forget_handles
from sparkdl.horovod.torch.process_sets import (
    ProcessSet,
    add_process_set,
    added_by_rule,
    bind,
    global_process_set,
    ranks_of_comm,
)
from sparkdl.horovod.torch.session import Session, problem_with
from sparkdl.topology import group_ranks, name_ranks

logger = logging.getLogger(__name__)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start recording the ranks' communication as a timeline; all ranks call it. A running timeline is ended first.

    The file is on rank 0's machine. While the timeline runs, it has the operations of rank 0; after
    :func:`stop_timeline` or ``shutdown`` it has those of all ranks.

    Args:
        file_path: path of the file; only rank 0's value is used.
        mark_cycles: whether to record ``CYCLE_START`` where a rank begins to run requests; idle cycles, which Horovod
            also records, do not exist here.

    Raises:
        ValueError: if ``init`` has not been called, or the file cannot be written.
    """
    world = session().world
    if world.timeline is not None:
        world.stop_timeline()
    session().mark_cycles(mark_cycles)
    world.start_timeline(file_path, is_live=True)


def stop_timeline() -> None:
    """End the timeline, if one runs, and write its file; all ranks call it.

    Raises:
        ValueError: if ``init`` has not been called, or the file cannot be written.
    """
    world = session().world
    if world.timeline is not None:
        world.stop_timeline()
    else:
        logger.info("There is no timeline to stop.")


def start_timeline_of(environment: Mapping[str, str]) -> None:
    """Start the timeline that rank 0's ``HOROVOD_TIMELINE`` asks for, if any; all ranks call it.

    Each rank marks its cycles if its own ``HOROVOD_TIMELINE_MARK_CYCLES`` is 1.
    """
    path = environment.get("HOROVOD_TIMELINE", "")
    encoded = b"" if path == "DYNAMIC" else path.encode()
    chosen = broadcast_bytes(session().world, encoded, root=0, name="HOROVOD_TIMELINE").decode()
    if chosen:
        start_timeline(chosen, mark_cycles=environment.get("HOROVOD_TIMELINE_MARK_CYCLES") == "1")


def read_stall_check(environment: Mapping[str, str]) -> StallCheck:
    """Read Horovod's environment variables of the stall check, with Horovod's defaults.

    Raises:
        ParamError: if one of them is not a number, or the time until the check is not positive.
    """

    def number(name: str, default: float) -> float:
        text = environment.get(name) or default
        try:
            return float(text)
        except ValueError as error:
            raise ParamError(f"{name} must be a number, got {text!r}") from error

    if number("HOROVOD_STALL_CHECK_DISABLE", 0.0) > 0:
        return StallCheck(warn_after_s=None)
    return StallCheck(
        warn_after_s=number("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0),
        abort_after_s=number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0) or None,  # 0 means never
    )


_members: list[int] = []
"""The launcher's ranks over which the current world was opened."""

_static_sets: list[ProcessSet] = []
"""The process sets that all calls of ``init`` were given for the current world."""


def init(comm: Iterable[int] | Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Initialize Horovod on the ranks that the launcher started. A second call changes nothing.

    Every rank reads Horovod's environment variables for the stall inspector. Rank 0's ``HOROVOD_TIMELINE``, unless it
    is ``DYNAMIC``, starts a timeline that ``shutdown`` ends.

    Args:
        comm: numbers of the ranks that take part, or an mpi4py communicator of them; None for all ranks.
        process_sets: process sets to open, the same on all ranks. ``"dynamic"``, which Horovod needs to allow
            ``add_process_set`` later, has no effect: it is always allowed here.

    Raises:
        LaunchError: if this process is not a rank: no communicator was opened for it.
        ParamError: on all ranks, if process sets on any of them occur twice, are empty, have ranks that do not exist,
            or differ between ranks; the message says which rank gave what. Nothing is left open then.
        ValueError: if this rank is not in ``comm``, or the timeline cannot be written; nothing is left open then. Also
            if Horovod is already initialized, without one of these process sets.
    """
    if isinstance(process_sets, Iterator):
        process_sets = list(process_sets)
    if not has_session():
        launched = communicator_for("hvd.init()")
        members = _members_of(comm, launched)
        _begin(launched, members, lambda world: _agree(world, process_sets))
    wanted = _list_process_sets(process_sets)
    for process_set in wanted:
        _bind(process_set)
    _static_sets.extend(wanted)


def shutdown() -> None:
    """Shut Horovod down; ``init`` may be called again. Outstanding operations fail, here and on the other ranks.

    Process sets other than the global one cannot be used until they are given to ``init`` or ``add_process_set`` again.

    Raises:
        CommunicatorError: if this is a signal handler in the middle of an operation; Horovod is then not shut down.
    """
    if has_session():
        session().check_caller()
    _static_sets.clear()
    added_by_rule.clear()
    cancel_at_end(shutdown)
    end_session()
    forget_handles()


def begin_again(reason: str = "", *, progress: int = -1) -> None:
    """Shut down and initialize again on the same ranks, with the process sets that ``init`` was given, if not removed.

    The same process set objects are usable again, including those that were added as rules. Without an earlier
    ``init``, this calls it. In an elastic run the ranks form another world: a set given to ``init`` by ranks then has
    the new world's ranks of the same numbers, and a set given as a rule has those that the rule returns; a set with a
    rank that does not exist stays closed.

    Args:
        reason: why the ranks begin again, for ranks that still wait for this one.
        progress: number of commits of this rank's state; in an elastic run the rank with most is rank 0.
    """
    if not has_session():
        init()
        return
    old, worlds = session(), provided.worlds
    again, by_rule = old.static_sets(), list(added_by_rule)
    objects = [
        process_set
        for process_set in _static_sets
        if (worlds is not None and (process_set.rule or process_set.process_set_id is not None))
        or (process_set._world_id == old.world_id and process_set.ranks in again)
    ]
    shutdown()
    if worlds is None:
        _begin(communicator_for("hvd.init()"), _members, lambda world: _exchange(world, again, [], None))
    else:
        worlds.meet_again(reason, progress)
        launched = communicator_for("hvd.init()")
        _begin(launched, list(range(launched.world_size)), lambda world: _agree(world, objects))
    for process_set in objects:
        _bind(process_set)
    _static_sets.extend(objects)
    for process_set in by_rule:
        add_process_set(process_set)


def is_initialized() -> bool:
    """Whether ``init`` has been called, and ``shutdown`` has not been called since."""
    return has_session()


def rank() -> int:
    """Number of this rank."""
    return session().world.rank


def size() -> int:
    """Number of ranks."""
    return session().world.world_size


def local_rank() -> int:
    """Position of this rank among those of its host."""
    return session().world.topology.local_rank


def local_size() -> int:
    """Number of ranks on this host."""
    return session().world.topology.local_size


def cross_rank() -> int:
    """Position of this rank's host among the hosts that have a rank of this ``local_rank``."""
    return session().world.topology.cross_rank


def cross_size() -> int:
    """Number of hosts that have a rank of this ``local_rank``."""
    return session().world.topology.cross_size


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks."""
    topology = session().world.topology
    return len(set(map(len, topology.ranks_by_host))) == 1


def _members_of(comm: Iterable[int] | Any, launched: Communicator) -> list[int]:
    if comm is None:
        return list(range(launched.world_size))
    if isinstance(comm, Iterable):
        return list(comm) or list(range(launched.world_size))
    return ranks_of_comm(comm, launched.rank)


def _begin(
    launched: Communicator,
    members: list[int],
    agree: Callable[[Communicator], tuple[str, list[list[int]]]],
) -> None:
    """Open a session over some of the launcher's ranks; ``agree`` returns its id and the ranks of its process sets."""
    global _members  # noqa: PLW0603  # there is one world at a time
    world = launched.split(members, "horovod", stall_check=read_stall_check(os.environ))
    if not world.is_member:
        raise ValueError(f"rank {launched.rank} is not one of the ranks {members} that hvd.init was given.")
    try:
        begin_session(Session(world, *agree(world)))
        start_timeline_of(os.environ)
    except BaseException:
        end_session()
        world.close()
        raise
    at_end(shutdown)
    _members = members
    global_process_set.ranks = list(session().ranks_of[0])


def _bind(process_set: ProcessSet) -> None:
    process_set.take_up_rule(session().world.world_size)
    number = session().id_of(process_set.ranks or [])
    if number is None and (process_set.rule or provided.worlds is not None):
        return  # it has no members in this world
    if number is None:
        raise ValueError(
            f"Horovod runs without {process_set}; use hvd.add_process_set, or hvd.shutdown first."
        )
    bind(process_set, number, session().world_id)


def _list_process_sets(process_sets: Any) -> list[ProcessSet]:
    """Check the argument of ``init`` as far as one rank can do so by itself, and return the process sets.

    Raises:
        ParamError: if it is neither process sets nor ``"dynamic"``.
    """
    if process_sets is None or (isinstance(process_sets, str) and process_sets.lower() == "dynamic"):
        return []
    if isinstance(process_sets, str):
        raise ParamError(
            f"process_sets={process_sets!r} names no process sets; give a list of hvd.ProcessSet, or 'dynamic'."
        )
    if isinstance(process_sets, Mapping) or not isinstance(process_sets, Iterable):
        process_sets = [process_sets]
    for number, entry in enumerate(listed := list(process_sets)):
        if not isinstance(entry, ProcessSet):
            raise ParamError(
                f"process_sets entry number {number} is a {type(entry).__name__} instead of a hvd.ProcessSet: {entry}"
            )
    return listed


def _agree(world: Communicator, process_sets: Any) -> tuple[str, list[list[int]]]:
    """Exchange the ranks' arguments of ``init``; return an id for the world and the ranks of every process set.

    Every rank takes part, even with an invalid argument, so that no rank waits for one that has raised an error.

    Raises:
        ParamError: on all ranks, if a rank gave invalid process sets, or the ranks gave different ones.
    """
    by_ranks: list[list[int]] = []
    by_comm: list[list[int]] = []
    problem = None
    try:
        wanted = _list_process_sets(process_sets)
        for process_set in wanted:
            if process_set.mpi_comm is not None:
                process_set.ranks = ranks_of_comm(process_set.mpi_comm, world.rank)
            process_set.take_up_rule(world.world_size)
            (by_ranks if process_set.mpi_comm is None else by_comm).append(process_set.ranks or [])
        if provided.worlds is not None or any(ps.rule for ps in wanted):
            by_ranks = _distinct(by_ranks, world.world_size)  # others may be meant for other worlds
        else:
            problem = _problem_among(wanted, world.world_size)
    except Exception as error:
        problem = str(error) if isinstance(error, ParamError) else f"{type(error).__name__}: {error}"
    return _exchange(world, by_ranks, by_comm, problem)


def _exchange(
    world: Communicator, by_ranks: list[list[int]], by_comm: list[list[int]], problem: str | None
) -> tuple[str, list[list[int]]]:
    """See :func:`_agree`. Of the process sets made from mpi4py communicators, each rank knows only its own."""
    report = json.dumps([uuid.uuid4().hex, problem, by_ranks, by_comm]).encode()
    reported = [json.loads(said) for said in allgather_bytes(world, report, name="process sets of hvd.init")]
    problems = _by_ranks({rank: said for rank, (_, said, _, _) in enumerate(reported) if said is not None})
    failed = "Horovod could not be initialized because"
    if problems:
        by_whom = "; ".join(f"{said.rstrip('.')} ({ranks})" for said, ranks in problems)
        raise ParamError(
            f"{failed} {by_whom}. Give all ranks the same process sets, no two of them with the same ranks. Nothing is "
            "open, so hvd.init() can be called again."
        )
    sets_of_ranks = _by_ranks({rank: str(sets) for rank, (_, _, sets, _) in enumerate(reported)})
    if len(sets_of_ranks) > 1:
        by_whom = "; ".join(f"{ranks}: {sets}" for sets, ranks in sets_of_ranks)
        raise ParamError(
            f"{failed} the ranks gave different process_sets: {by_whom}. Give all ranks the same, in the same order. "
            "Nothing is open, so hvd.init() can be called again."
        )
    from_comms = sorted({tuple(ranks) for _, _, _, sets in reported for ranks in sets})
    return reported[0][0], [*map(list, from_comms), *by_ranks]


def _distinct(sets: Sequence[list[int]], world_size: int) -> list[list[int]]:
    """Those process sets that can be opened besides the global one, each once."""
    distinct: list[list[int]] = []
    for ranks in sets:
        if len(ranks) < world_size and ranks not in distinct and problem_with(ranks, world_size) is None:
            distinct.append(ranks)
    return distinct


def _by_ranks(said: Mapping[int, str]) -> list[tuple[str, str]]:
    """The distinct texts of the ranks, each with the names of the ranks that gave it."""
    return [(text, name_ranks(ranks)) for text, ranks in group_ranks(said.items()).items()]


def _problem_among(process_sets: Sequence[ProcessSet], world_size: int) -> str | None:
    seen = [list(range(world_size))]
    for number, process_set in enumerate(process_sets):
        ranks = seen[0] if process_set.process_set_id == 0 else process_set.ranks or []
        if ranks in seen:
            return f"process_sets entry number {number} is a duplicate: {process_set}"
        problem = problem_with(ranks, world_size)
        if problem is not None:
            return f"process_sets entry number {number} cannot have ranks {ranks}: {problem}"
        seen.append(ranks)
    return None


def mpi_built() -> bool:
    """Whether ``transport="mpi"`` is available: mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether the ranks communicate over MPI."""
    return has_session() and session().world.transport == "mpi"


def mpi_threads_supported() -> bool:
    """True: sparkdl initializes MPI for use by several threads.

    Raises:
        ValueError: if the ranks do not communicate over MPI.
    """
    if not mpi_enabled():
        raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")
    return True


def gloo_built() -> bool:
    """True: sparkdl's native core, which takes the place of Horovod's Gloo, is always available."""
    return True


def gloo_enabled() -> bool:
    """Whether the ranks communicate over the native core, which takes the place of Horovod's Gloo."""
    return has_session() and not mpi_enabled()


def nccl_built() -> int:
    """NCCL's version, such as 22706 for 2.27.6; 0 if NCCL or the driver is missing."""
    try:
        major, minor, patch = (int(part) for part in load_nccl().version.split("."))
    except TransportUnavailableError:
        return 0
    return 10_000 * major + 100 * minor + patch


def ddl_built() -> bool:
    """False: IBM's library is not used."""
    return False


def ccl_built() -> bool:
    """False: Intel's library is not used."""
    return False


def cuda_built() -> bool:
    """Whether CUDA tensors can be used: torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether ROCm tensors can be used: torch was built with ROCm."""
    return torch.version.hip is not None
