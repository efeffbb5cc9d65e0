"""Pickles the function that runs on the ranks, and names what cannot travel. Runs on the driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle

from sparkdl.errors import SerializationError


def pickle_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call with everything it needs.

    Raises:
        SerializationError: if something cannot be pickled; the message names the function or the arguments.
    """
    try:
        payload: bytes = cloudpickle.dumps((function, args, kwargs))
    except Exception as error:
        named = {"function": function, **{f"argument {i}": arg for i, arg in enumerate(args)}, **kwargs}
        culprits = [name for name, value in named.items() if not _can_be_pickled(value)]
        raise SerializationError(
            f"{', '.join(culprits) or 'The call'} cannot be pickled, so it cannot travel to the ranks: {error}. "
            "Create locks, connections and sessions inside the function instead."
        ) from error
    return payload


def _can_be_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
