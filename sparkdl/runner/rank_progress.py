"""``progress()`` of a function that a Runner runs: what it is held to once it has called it. Runs on a *rank*."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkdl.launch import RankContext

_contexts: list[RankContext] = []
"""That of the rank which this process is; none in any other process."""


def provide_progress(context: RankContext) -> None:
    """Have :func:`progress` speak for this rank."""
    _contexts[:] = [context]


def progress(*, done: bool = False) -> None:
    """Say that the function has come a step further; call it as often as you like, it costs next to nothing.

    From the first call on, a rank that does not call this for the Runner's ``hang_timeout_s``, and waits for no other
    rank meanwhile, counts as hanging. A function that never calls it may compute as long as it keeps nobody waiting.
    In a process that is no rank of a Runner, as where a script is tried alone, it does nothing.

    Args:
        done: that was the last step, and what follows may take as long as it keeps nobody waiting.
    """
    for context in _contexts:
        context.progress(done=done)
