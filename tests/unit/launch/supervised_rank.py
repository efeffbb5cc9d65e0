"""A rank with its supervisor, without Spark."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import cloudpickle

from sparkdl.collective import Coordinator
from sparkdl.collective.job import RankJob
from sparkdl.launch.rank.environment import rank_environment
from sparkdl.launch.task.supervisor import RankSupervisor
from sparkdl.launch.wire.outcome import Failure, StopReason
from sparkdl.rendezvous.handshake import new_secret


@contextmanager
def supervised(
    function: Any,
    *args: Any,
    environment: Mapping[str, str] | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    before_begin: Callable[[list[str]], None] | None = None,
    stop_before_begin: StopReason | None = None,
    **options: Any,
) -> Iterator[tuple[RankSupervisor, list[str], list[dict[str, Any]]]]:
    """Run a rank; yield its supervisor, and the lists of its lines and of its events."""
    secret, lines, events = new_secret(), [], []
    has_line = threading.Event()

    def on_line(line: str) -> None:
        lines.append(line)
        has_line.set()

    with (
        Coordinator(secret=secret, world_size=1, host="127.0.0.1") as coordinator,
        RankSupervisor(
            rank=0,
            payload=cloudpickle.dumps((function, args, {})),
            environment=rank_environment(environment or {}, gpus=None, num_threads=1),
            on_line=on_line,
            on_event=on_event or events.append,
            **options,
        ) as supervisor,
    ):
        if before_begin is not None:
            assert has_line.wait(60)
            before_begin(lines)
        if stop_before_begin is not None:
            supervisor.stop(stop_before_begin)
        supervisor.begin(
            RankJob(rank=0, world_size=1, coordinator=coordinator.address, secret=secret, timeout_s=10.0)
        )
        yield supervisor, lines, events


def value_of(supervisor: RankSupervisor) -> Any:
    supervisor.result.seek(0)
    return pickle.load(supervisor.result)


def returned_by(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a function on a rank; return its return value."""
    with supervised(function, *args, **options) as (supervisor, _, _):
        failure = supervisor.wait()
        assert failure is None, failure
        return value_of(supervisor)


def failure_of(function: Callable[..., Any], *args: Any, **options: Any) -> Failure:
    """Run a function on a rank that fails; return its failure."""
    with supervised(function, *args, **options) as (supervisor, _, _):
        failure = supervisor.wait()
    assert failure is not None
    return failure
