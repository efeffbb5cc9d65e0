"""Errors of collectives, in our own classes also where c10d lets only their text through.

Runs on the *rank*.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

from sparkdl.torch.process_group import SparkdlProcessGroup

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def collective_errors(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise the error of a failed collective itself, where torch raises a ``RuntimeError`` that quotes it.

    ``DistributedDataParallel`` waits on c10d futures in C++, which keep only the text of an error. Around
    ``loss.backward()`` this gives, say, the ``RankLostError`` that the allreduce raised. Other errors pass.

    Args:
        group: the process group; the default group if None.

    Raises:
        CommunicatorError: if a collective of the group failed; the subclass says how.
    """
    try:
        yield
    except RuntimeError as error:
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        failure = group.failure if isinstance(group, SparkdlProcessGroup) else None
        if failure is None or failure is error:
            raise
        raise failure from error
