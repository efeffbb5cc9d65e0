"""Params of the columns that ``transform`` adds; :mod:`.params` puts them together with the others."""

from __future__ import annotations

from pyspark.ml.param import Param, Params
from pyspark.ml.param.shared import HasPredictionCol, HasProbabilityCol, HasRawPredictionCol

from sparkdl.errors import ParamError
from sparkdl.estimators.param_mixins import P, one_of
from sparkdl.estimators.scored_columns import PREDICTION_TYPES, ScoredColumn


class HasScoredColumns(HasRawPredictionCol, HasProbabilityCol, HasPredictionCol):
    """Params ``predictionCol``, ``probabilityCol`` and ``rawPredictionCol``, of pyspark, and ``predictionType``.

    As everywhere in Spark ML, a column whose name is the empty string is not added. pyspark's mixins come in the order
    in which its ``Classifier`` has them, from which classes here derive as well.
    """

    predictionType: Param[str] = Param(
        Params._dummy(),
        "predictionType",
        "type of predictionCol: auto (as the label column calls classes, else double or array), double, long, array or "
        "vector",
        one_of(*PREDICTION_TYPES),
    )

    def getPredictionType(self) -> str:
        """Return the type of predictionCol."""
        return self.getOrDefault(self.predictionType)

    def setPredictionType(self: P, value: str) -> P:
        """Set the type of predictionCol."""
        return self._set(predictionType=value)

    def setProbabilityCol(self: P, value: str) -> P:
        """Set the column of class probabilities that transform adds; with an empty name it adds none."""
        return self._set(probabilityCol=value)

    def setRawPredictionCol(self: P, value: str) -> P:
        """Set the column of class scores that transform adds; with an empty name it adds none."""
        return self._set(rawPredictionCol=value)


def scored_columns_of(params: HasScoredColumns) -> tuple[ScoredColumn, ...]:
    """Return the columns that transform adds, in Spark's order.

    Raises:
        ParamError: if there are none, or two of one name.
    """
    columns = (
        ScoredColumn(name=params.getRawPredictionCol(), answer="rawPrediction"),
        ScoredColumn(name=params.getProbabilityCol(), answer="probability"),
        ScoredColumn(name=params.getPredictionCol(), type=params.getPredictionType()),
    )
    named = tuple(column for column in columns if column.name)
    if not named:
        raise ParamError(
            "Params predictionCol, probabilityCol and rawPredictionCol are all empty, so that transform adds "
            "nothing. Name one of them."
        )
    if len({column.name for column in named}) < len(named):
        given = ", ".join(f"{column.param} {column.name!r}" for column in named)
        raise ParamError(f"Two columns cannot have one name: {given}. Name them differently.")
    return named
