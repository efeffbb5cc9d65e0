"""The turns of ``sparkdl bench scaling`` on a Spark cluster: each is a launch of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.cli.local_session import start_session
from sparkdl.launch import run_on_ranks

if TYPE_CHECKING:
    from sparkdl.bench.rank_group import Answer
    from sparkdl.bench.scaling import Measure, ScalingContender
    from sparkdl.launch import RankContext


def turns_on_spark(master: str, stack: ExitStack) -> Measure:
    """Start a session, and return what lets a contender take a turn there.

    Args:
        master: URL of the cluster's master.
        stack: stops the session at its end.
    """
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparkdl-bench-")))
    session = stack.enter_context(start_session("sparkdl bench scaling", master, folder))

    def measure(contender: ScalingContender, case: Mapping[str, Any], steps: int) -> list[Answer]:
        return run_on_ranks(
            take_turn_on_rank,
            contender.name,
            dict(case),
            steps,
            num_ranks=contender.ranks,
            spark=session,
            threads_per_rank=case["threads"],
            modules=("torch",),
        )

    return measure


def take_turn_on_rank(context: RankContext, contender: str, case: dict[str, Any], steps: int) -> Answer:
    """Take a turn on a rank that Spark has started."""
    import sparkdl.torch
    from sparkdl.bench.contenders.rank import TRIALS, take_turn

    sparkdl.torch.init_process_group(context.communicator)
    try:
        trial = TRIALS["scaling"](context.communicator, contender, case)
        times = take_turn(context.communicator, trial, steps, 1)
        return {"times": times, "result": trial.result()}
    finally:
        sparkdl.torch.destroy_process_group()
