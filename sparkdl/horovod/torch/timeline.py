"""Horovod's timeline. Runs on ranks; see :meth:`sparkdl.collective.Communicator.start_timeline`."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from sparkdl.collective.byte_exchange import broadcast_bytes
from sparkdl.horovod.torch.current_session import session

logger = logging.getLogger(__name__)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to write down what the ranks communicate; all ranks call it. A timeline that runs already is ended.

    The file, on rank 0's machine, has what rank 0 sees while the timeline runs, and what all ranks saw after
    :func:`stop_timeline` or ``shutdown``.

    Args:
        file_path: the file; rank 0's counts.
        mark_cycles: show as ``CYCLE_START`` where a rank begins to run what was asked of it; idle cycles, which
            Horovod shows too, do not exist here.

    Raises:
        ValueError: if ``init`` has not been called, or the file cannot be written.
    """
    world = session().world
    if world.has_timeline:
        world.stop_timeline()
    session().mark_cycles(mark_cycles)
    world.start_timeline(file_path, is_live=True)


def stop_timeline() -> None:
    """End the timeline, if one runs, and write its file; all ranks call it.

    Raises:
        ValueError: if ``init`` has not been called, or the file cannot be written.
    """
    world = session().world
    if world.has_timeline:
        world.stop_timeline()
    else:
        logger.info("There is no timeline to stop.")


def start_timeline_of(environment: Mapping[str, str]) -> None:
    """Begin the timeline that rank 0's ``HOROVOD_TIMELINE`` asks for, if it does; all ranks call it.

    Each rank marks its cycles if its own ``HOROVOD_TIMELINE_MARK_CYCLES`` is 1.
    """
    path = environment.get("HOROVOD_TIMELINE", "")
    own = b"" if path == "DYNAMIC" else path.encode()
    chosen = broadcast_bytes(session().world, own, root=0, name="HOROVOD_TIMELINE").decode()
    if chosen:
        start_timeline(chosen, mark_cycles=environment.get("HOROVOD_TIMELINE_MARK_CYCLES") == "1")
