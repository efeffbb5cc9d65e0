"""Refuses outputs that a loss of torch takes for something else: raw scores where it wants probabilities.

Runs on the *driver*, on the first row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from sparkdl.errors import ParamError
from sparkdl.training.losses import is_torch_loss

if TYPE_CHECKING:
    from torch import Tensor

    from sparkdl.training.losses import LossFunction

_MAX_LOG_OF_SUM = 0.1
"""How far the log of the sum of all probabilities may be from 0: rounding in half precision, or a small epsilon."""


def check_output_range(loss: LossFunction, outputs: Tensor) -> None:
    """Check that outputs can be the probabilities, or their logs, that BCELoss and NLLLoss take.

    Args:
        loss: any other one takes any numbers.
        outputs: of the first row, of shape ``(rows, ...)``, for NLLLoss ``(rows, classes, ...)``.

    Raises:
        ParamError: if they are not; the message names the layer or the loss that mends it.
    """
    if not is_torch_loss(loss):
        return
    values = outputs.detach()
    if isinstance(loss, nn.BCELoss):
        outside = values[(values < 0) | (values > 1)]
        if outside.numel():
            raise ParamError(
                f"Param loss is BCELoss, which takes a probability, and the model's output for the first row is "
                f"{outside[0].item():.4g}, outside 0 to 1. End the model with nn.Sigmoid(), or leave the model as it "
                "is and use nn.BCEWithLogitsLoss()."
            )
    elif isinstance(loss, nn.NLLLoss):
        logs = values.float().logsumexp(dim=1)
        wrong = logs[logs.abs() > _MAX_LOG_OF_SUM]
        if wrong.numel():
            raise ParamError(
                "Param loss is NLLLoss, which takes the log of each class's probability, and the model's outputs for "
                f"the first row make probabilities whose sum is {wrong[0].exp().item():.4g}, not 1. End the model with "
                "nn.LogSoftmax(dim=1), or leave the model as it is and use nn.CrossEntropyLoss()."
            )
