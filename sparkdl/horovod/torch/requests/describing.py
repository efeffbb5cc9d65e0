"""Descriptions of requests from their tensors; made once for a tensor that comes again in every step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from sparkdl.horovod.torch.engine.description import Description, Kind
from sparkdl.horovod.torch.engine.mismatches import refuse_join
from sparkdl.horovod.torch.exceptions import HorovodInternalError

_PLAIN: dict[str, type[int] | type[float]] = {
    "op": int,
    "root": int,
    "root_rank": int,
    "prescale": float,
    "postscale": float,
}


def describe(kind: Kind, name: str, tensors: Sequence[torch.Tensor], **options: Any) -> Description:
    """Describe a request.

    Args:
        kind: what it does.
        name: by which it is matched.
        tensors: what it is about.
        options: further attributes of :class:`~sparkdl.horovod.torch.engine.description.Description`, also as the
            numbers of NumPy or torch that programs compute them with.
    """
    dtypes, shapes = tuple(tensor.dtype for tensor in tensors), tuple(tensor.shape for tensor in tensors)
    numbers = tuple((option, _PLAIN[option](value)) for option, value in options.items())
    return _describe(kind, name, dtypes, shapes, numbers)


@lru_cache(maxsize=4096)
def _describe(
    kind: Kind,
    name: str,
    dtypes: tuple[torch.dtype, ...],
    shapes: tuple[torch.Size, ...],
    options: tuple[tuple[str, Any], ...],
) -> Description:
    return Description(
        kind=kind,
        name=name,
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in dtypes),
        shapes=tuple(tuple(shape) for shape in shapes),
        **dict(options),
    )


def refuse_ranks_that_joined(kind: Kind, given: np.ndarray[Any, Any]) -> None:
    """Refuse to go on if a row of ``given`` does not begin with the one that ranks with data give.

    Raises:
        HorovodInternalError: the same on all ranks.
    """
    joined = [rank for rank, first in enumerate(given[:, 0].tolist()) if not first]
    error = refuse_join(kind, joined)
    if error is not None:
        raise HorovodInternalError(error)
