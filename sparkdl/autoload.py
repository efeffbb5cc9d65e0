"""Extension of ``import torch`` that connects torch.distributed in a rank of sparkdl to the other ranks.

Runs on the *rank*, and does nothing elsewhere. The entry point ``torch.backends`` names :func:`load`, which torch
calls at the end of ``import torch`` unless ``TORCH_DEVICE_BACKEND_AUTOLOAD`` is 0. A program that never imports
sparkdl can therefore call ``init_process_group("sparkdl")``, and ``env://`` connects it to the job's coordinator.
Heavy modules are imported only by such a call, because the processes that a rank starts, such as DataLoader workers,
import torch as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from sparkdl.patches.accelerate import teach_accelerate

_MARK = "SPARKDL_COORDINATOR"
"""Environment variable that every rank of ``sparkdl run`` has; see :mod:`sparkdl.collective.job`."""


def load() -> None:
    """Register the backend and the rendezvous in a rank; both import :mod:`sparkdl.torch` on first use."""
    if not os.environ.get(_MARK):
        return
    import torch.distributed as dist

    if not dist.is_available():  # this torch was built without torch.distributed
        return
    from sparkdl.patches.rendezvous_handlers import replace_handlers

    if "sparkdl" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "sparkdl", _create_process_group, extended_api=True, devices=["cpu", "cuda"]
        )
    replace_handlers(_meet)
    teach_accelerate()


def _create_process_group(options: Any, second: object) -> Any:
    from sparkdl.torch.registration import create_process_group

    return create_process_group(options, second)


def _meet(url: str, **kwargs: Any) -> Iterator[Any]:
    from sparkdl.torch.registration import meet

    return meet(url, **kwargs)
