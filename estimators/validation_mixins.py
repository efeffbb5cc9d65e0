"""One small mixin for each group of Params about validation; :mod:`.params` puts them together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasValidationIndicatorCol

from sparkdl.errors import ParamError
from sparkdl.estimators.param_mixins import P
from sparkdl.training.metrics import Metric

_NAME = re.compile(r"[A-Za-z][\w.\- ]*")
EPOCH_METRICS = ("loss", "rows_per_s", "seconds", "data_wait_share", "learning_rate", "validation_s")
"""What MLflow is told of an epoch beside the metrics, by names that these cannot have."""


class HasValidation(HasValidationIndicatorCol):
    """Params ``validationIndicatorCol`` and ``validationFraction``."""

    validationFraction: Param[float] = Param(
        Params._dummy(),
        "validationFraction",
        "share of the rows, drawn by lot, to validate on (between 0 and 1)",
        TypeConverters.toFloat,
    )

    def getValidationFraction(self) -> float | None:
        """Return the share of the rows to validate on, if it is set."""
        return self.getOrDefault(self.validationFraction) if self.isSet(self.validationFraction) else None

    def setValidationFraction(self: P, value: float) -> P:
        """Set the share of the rows to validate on."""
        return self._set(validationFraction=value)

    def setValidationIndicatorCol(self: P, value: str) -> P:
        """Set the column of booleans that are true for rows to validate on."""
        return self._set(validationIndicatorCol=value)


def check_validation(params: HasValidation) -> None:
    """Check what needs no data.

    Raises:
        ParamError: naming the Param, its value and what it may be.
    """
    fraction = params.getValidationFraction()
    if fraction is not None and not 0 < fraction < 1:
        raise ParamError(f"Param validationFraction is {fraction}: {params.validationFraction.doc}.")
    if fraction is not None and params.isSet(params.validationIndicatorCol):
        raise ParamError(
            f"Params validationFraction ({fraction}) and validationIndicatorCol "
            f"({params.getValidationIndicatorCol()!r}) both say which rows to validate on. Set one of them."
        )


class HasMetrics(Params):
    """Param ``metrics``."""

    metrics: Param[Any] = Param(
        Params._dummy(),
        "metrics",
        "by name functions of (outputs, labels) that return one value per row or their mean; or torchmetrics",
    )

    def getMetrics(self) -> dict[str, Metric]:
        """Return the metrics by name, if there are any."""
        return dict(self.getOrDefault(self.metrics)) if self.isSet(self.metrics) else {}

    def setMetrics(self: P, value: Mapping[str, Metric]) -> P:
        """Set the metrics by name."""
        return self._set(metrics=value)

    def check_metrics(self) -> None:
        """Check what needs no data.

        Raises:
            ParamError: naming the metric and what is wrong with it.
        """
        given: Any = self.getOrDefault(self.metrics) if self.isSet(self.metrics) else {}
        if not isinstance(given, Mapping):
            raise ParamError(
                "Param metrics must be a dict, such as {'mae': torch.nn.L1Loss()}, of functions of (outputs, labels) "
                "that return one value per row or their mean, or of torchmetrics metrics; got a "
                f"{type(given).__name__}."
            )
        for name, metric in given.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ParamError(
                    f"Param metrics has the name {name!r}. Choose one of letters, digits, '_', '-', '.' and spaces "
                    "that begins with a letter."
                )
            if name in EPOCH_METRICS or name.startswith("val_"):
                raise ParamError(
                    f"Param metrics has the name {name!r}, which stands for something else. Choose another; on the "
                    "validation rows 'val_' comes before it."
                )
            if not callable(metric):
                raise ParamError(
                    f"Metric {name!r} must be a function of (outputs, labels) that returns one value per row or their "
                    f"mean, or a torchmetrics metric; got a {type(metric).__name__}."
                )
