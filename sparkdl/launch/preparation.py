"""What Spark tasks that run before the ranks do for them: begin to import what a rank needs. Runs on an *executor*."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from sparkdl.errors import LaunchError
from sparkdl.launch.kept_nurseries import Kind, prepare_rank
from sparkdl.launch.rank_environment import rank_environment

if TYPE_CHECKING:
    from collections.abc import Sequence


def prepare_in_task(partition: int, *, num_ranks: int, modules: Sequence[str]) -> None:
    """Have a process import modules beside a task; the ranks that this executor runs next begin with it.

    Args:
        partition: number of the task. Later ones than there are ranks prepare nothing: there may be thousands of them.
        num_ranks: of the launch that follows, whose ranks have no GPUs: those are given them by their own task.
        modules: that :func:`~sparkdl.launch.run_on_ranks` is called with.
    """
    if partition < num_ranks:
        with suppress(LaunchError):  # the launch will tell
            prepare_rank(Kind(rank_environment({}, gpus=None), tuple(modules)))
