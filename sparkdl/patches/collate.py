"""torch's ``default_collate`` joins samples of a class by a function of ours.

It has a map of such functions, which torch documents, but no public name for it. Upstream: none. Versions: all up to
torch 2.13; if a release has moved the map, a warning is logged. It can go when ``torch.utils.data`` exports the map.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


def set_collate(kind: type, join: Callable[..., Any], *, otherwise: str) -> None:
    """Let ``default_collate`` join samples of a class by a function.

    Args:
        kind: the class.
        join: function that takes a list of samples.
        otherwise: what happens if this release of torch cannot be changed so, for the warning.
    """
    try:
        import_module("torch.utils.data._utils.collate").default_collate_fn_map[kind] = join
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning("This release of torch has no map of collate functions (%s): %s.", error, otherwise)
