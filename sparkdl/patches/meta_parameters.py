"""Parameters that modules register are moved to the meta device, and buffers are not.

``torch.device("meta")`` moves both, and torch has no context for parameters alone. Others replace
``nn.Module.register_parameter`` meanwhile, which two threads do not survive: see
https://github.com/huggingface/peft/issues/3605. Here, a hook of torch's for all modules is registered once, and does
nothing in threads that are outside of the context.

Upstream: https://github.com/pytorch/pytorch/pull/86148 added the hook. Versions: all up to torch 2.13. It can go when
torch offers a context for parameters alone.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def on_meta() -> Iterator[None]:
    """Context in which modules that this thread makes have their parameters on the meta device, but not their buffers.

    Unlike with ``torch.device("meta")``, tables that a constructor computes as buffers are therefore correct.
    """
    _watch_parameters()
    before, _thread.is_on_meta = getattr(_thread, "is_on_meta", False), True
    try:
        yield
    finally:
        _thread.is_on_meta = before


_thread = threading.local()


@cache
def _watch_parameters() -> None:
    # Never removed: other threads may be making modules, and torch's hooks must not change meanwhile.
    register_module_parameter_registration_hook(_move_parameter)  # type: ignore[arg-type]  # torch takes a result


def _move_parameter(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    if not getattr(_thread, "is_on_meta", False) or parameter.is_meta:
        return None
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
