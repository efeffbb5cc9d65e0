"""torch's rendezvous of a URL, such as ``env://``, goes by way of a job's coordinator.

torch's ``register_rendezvous_handler`` refuses a scheme that has a handler, so the handlers are replaced in its private
table. Upstream: none. Versions: all up to torch 2.13. It can go when handlers may be registered again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.rendezvous import _rendezvous_handlers


def replace_handlers(handler: Callable[..., Any]) -> None:
    """Replace the handlers of all schemes that torch has. Idempotent."""
    _rendezvous_handlers.update(dict.fromkeys(("env", "tcp", "file"), handler))
