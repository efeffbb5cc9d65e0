"""An exception as bytes, with those that it was raised from: pickling alone leaves these behind."""

from __future__ import annotations

import pickle
import traceback
from itertools import pairwise

import cloudpickle


def error_text(error: BaseException) -> str:
    """Type and message of an exception, also of one whose message cannot be made."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return traceback.format_exception_only(type(error), error)[-1].strip()


def pack_error(error: BaseException) -> bytes:
    """Return an exception and its causes, up to the first that cannot be pickled; nothing if it is that itself."""
    packed: list[bytes] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        try:
            packed.append(cloudpickle.dumps(cause))
        except Exception:
            break  # it is told by the traceback
        cause = cause.__cause__
    return pickle.dumps(packed) if packed else b""


def unpack_error(packed: bytes) -> BaseException | None:
    """Return what :func:`pack_error` packed, up to the first whose class cannot be built here; None if there is none.

    Only for bytes that came through a channel that is trusted: this runs what they say.
    """
    errors: list[BaseException] = []
    for each in pickle.loads(packed) if packed else ():  # noqa: S301 - as the docstring says
        try:
            error = pickle.loads(each)  # noqa: S301 - likewise
        except Exception:
            break
        if not isinstance(error, BaseException):
            break
        errors.append(error)
    for outer, cause in pairwise(errors):
        outer.__cause__ = cause
    return errors[0] if errors else None
