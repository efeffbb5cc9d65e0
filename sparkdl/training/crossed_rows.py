"""Finds out whether a loss of the user's own compares every row with every other one, without a word from torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from sparkdl.training.losses import LossFunction

_NUM_ROWS = 3
"""A number of rows that is seldom another dimension of a tensor."""

_CROSSED = (_NUM_ROWS, _NUM_ROWS)


def crosses_rows(loss: LossFunction, outputs: Tensor, targets: Tensor) -> bool:
    """Return whether the loss broadcasts outputs of shape ``(N, 1)`` with labels of shape ``(N,)`` to ``(N, N)``.

    Args:
        loss: a function, tried on copies of one row.
        outputs: of one row, of any shape.
        targets: of that row, likewise.
    """
    if outputs.shape != (1, 1) or targets.shape != (1,):
        return False
    watch = _Watch()
    # Whatever it raises on several rows it raises again where it is tried on what it is given.
    with suppress(Exception), torch.no_grad(), watch:
        loss(outputs.detach().repeat(_NUM_ROWS, 1), targets.repeat(_NUM_ROWS))
    return watch.has_crossed


class _Watch(TorchFunctionMode):
    """Sees every function of torch that is called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.has_crossed = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tuple(each.shape) for each in args if isinstance(each, Tensor)}
        if (
            isinstance(result, Tensor)
            and result.shape == _CROSSED
            and given == {(_NUM_ROWS, 1), (_NUM_ROWS,)}
        ):
            self.has_crossed = True
        return result
