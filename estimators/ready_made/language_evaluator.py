"""The perplexity of a language model on texts, as an evaluator of Spark ML."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pyspark import keyword_only
from pyspark.ml.evaluation import Evaluator
from pyspark.ml.param.shared import HasPredictionCol
from pyspark.ml.util import DefaultParamsReadable, DefaultParamsWritable

from sparkdl.data.dataset.dataset import missing_column_error
from sparkdl.data.spark.columns import quote, stored_type
from sparkdl.data.spark.reading import reading_job
from sparkdl.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class PerplexityEvaluator(Evaluator, HasPredictionCol, DefaultParamsReadable[Any], DefaultParamsWritable):
    """Evaluates the perplexity: the exponential of the mean negative log-likelihood of all tokens; lower is better.

    It reads the column that a model of :class:`LanguageModel` with ``output="logLikelihood"`` writes: arrays of the sum
    over the tokens of a text and the number of these tokens. ``CrossValidator`` and ``TrainValidationSplit`` can thus
    choose among such estimators. Only models that divide texts into the same tokens can be compared.
    """

    @keyword_only
    def __init__(self, *, predictionCol: str = "prediction") -> None:
        super().__init__()
        self._set(predictionCol=predictionCol)

    def setPredictionCol(self, value: str) -> PerplexityEvaluator:
        """Set the column of log-likelihoods."""
        self._set(predictionCol=value)
        return self

    def isLargerBetter(self) -> bool:
        """Return False: a lower perplexity is better."""
        return False

    def _evaluate(self, dataset: DataFrame) -> float:
        from pyspark.sql import functions as F

        name = self.getPredictionCol()
        if name not in dataset.columns:
            raise missing_column_error(name, dataset.columns)
        kind = stored_type(dataset.schema[name].dataType)
        if kind is None or kind[0] != "number" or not kind[1].startswith("float") or kind[2] != 1:
            raise DataError(
                f"Column {name!r} holds {dataset.schema[name].dataType.simpleString()}, and the perplexity is computed "
                'from log-likelihoods. Set output="logLikelihood" in the LanguageModel or its model.'
            )
        column = F.col(quote(name))
        sums = dataset.agg(F.sum(column[0]).alias("sum"), F.sum(column[1]).alias("count"))
        with reading_job(dataset.sparkSession, "computing the perplexity"):
            row = sums.collect()[0]
        if not row["count"]:
            raise DataError("No text has two tokens, so there is no perplexity.")
        try:
            return math.exp(-row["sum"] / row["count"])
        except OverflowError:  # a useless model
            return math.inf
