"""What every launch has in common, in Spark or on this machine: checks of arguments, supervision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from sparkdl.checks import check_counts
from sparkdl.collective import check_timeout, check_transport, uses_mpi
from sparkdl.errors import ParamError
from sparkdl.launch.supervision import Listener, OnEvent, OnLog, Supervision
from sparkdl.launch.wire.channel import DriverChannel

if TYPE_CHECKING:
    from sparkdl.launch.elastic.offers import Invitation
    from sparkdl.launch.elastic.roster import ElasticLimits
    from sparkdl.launch.stage import Stage
    from sparkdl.launch.wire.spec import LaunchSpec

MakeStage: TypeAlias = "Callable[[LaunchSpec, int], Stage]"
"""Starts the tasks of a spec; the number is that of the slot of its first rank, such as of a machine's GPUs."""


def check_spec(spec: LaunchSpec, elastic: ElasticLimits | None = None) -> None:
    """Check the arguments of a launch, which are those of :func:`~sparkdl.launch.run_on_ranks`.

    Raises:
        ParamError: if an argument has a value that cannot work.
    """
    threads_per_rank = 1 if spec.num_threads is None else spec.num_threads
    check_counts(least=1, num_ranks=spec.num_ranks, threads_per_rank=threads_per_rank)
    check_counts(least=0, gpus_per_rank=spec.gpus_per_rank)
    check_transport(spec.transport, spec.wire)
    check_timeout(spec.start_timeout_s, "start_timeout_s")
    if elastic is None:
        return
    if not 1 <= elastic.least <= spec.num_ranks <= elastic.most:
        raise ParamError(
            f"An elastic launch begins with {spec.num_ranks} ranks, which have to be between its minimum, "
            f"{elastic.least}, and its maximum, {elastic.most}; the minimum is at least 1."
        )
    if any(number % elastic.group_size for number in (elastic.least, spec.num_ranks, elastic.most)):
        raise ParamError(
            f"An elastic launch has a minimum of {elastic.least}, begins with {spec.num_ranks}, and has a maximum of "
            f"{elastic.most} ranks: all have to be multiples of {elastic.group_size}, the ranks that share a model."
        )
    if uses_mpi(spec.transport):
        raise ParamError(
            f"transport={spec.transport!r} cannot be elastic: no rank can leave or join an MPI world. Use 'auto'."
        )


def run_spec(
    make_stage: MakeStage,
    spec: LaunchSpec,
    *,
    host: str | Sequence[str],
    on_log: OnLog | None = None,
    on_event: OnEvent | None,
    elastic: ElasticLimits | None = None,
    leases: Iterator[str] | None = None,
    on_open: Callable[[Invitation], None] | None = None,
) -> list[Any]:
    """Run the ranks of a launch, and return their values in order of rank.

    Args:
        make_stage: function that starts the tasks of a spec, the first of them in the slot of that number.
        spec: spec of the launch.
        host: address or addresses of this machine at which the tasks reach it.
        on_log: called with rank and line; prints ``[rank N] line`` when None.
        on_event: called with rank and event; events are dropped when None.
        elastic: limits of an elastic launch; None for one whose ranks start and end together.
        leases: names under which successive worlds of an elastic launch use a folder.
        on_open: called with the invitation that other processes need to offer slots to an elastic launch.

    Raises:
        SparkdlError: as :func:`~sparkdl.launch.run_on_ranks`.
    """
    if elastic is not None:
        from sparkdl.launch.elastic.members import run_members

        return run_members(
            make_stage,
            spec,
            elastic,
            host=host,
            on_log=on_log,
            on_event=on_event,
            leases=leases,
            on_open=on_open,
        )
    channel = DriverChannel(spec.secret, spec.num_ranks, host=host)
    complete = replace(spec, driver=channel.address)
    listener = Listener(on_log, on_event, num_ranks=spec.num_ranks)
    with Supervision(lambda: make_stage(complete, 0), channel, spec.limits, listener) as supervision:
        while supervision.poll(0.1):
            pass
        return supervision.values()
