"""The Spark ML model that a fit returns. Runs on the *driver*; its predictions run on the executors."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.ml import Model
from pyspark.ml.functions import vector_to_array
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import functions as F
from pyspark.sql.types import StructField

from sparkdl.data.dataset.dataset import missing_column_error
from sparkdl.data.spark.columns import (
    ambiguous_column_error,
    check_case,
    check_like,
    is_vector,
    quoted,
    without_decimals,
)
from sparkdl.errors import ParamError
from sparkdl.estimators.params.estimator import _TorchParams
from sparkdl.estimators.params.inputs import scored_columns_of
from sparkdl.estimators.persistence import TorchModelReader, TorchModelWriter
from sparkdl.estimators.scoring.columns import check_scored_columns, of_spark
from sparkdl.estimators.scoring.models import ScoringModels
from sparkdl.estimators.scoring.udf import packing_of, prediction_udf
from sparkdl.estimators.summary import TrainingSummary

if TYPE_CHECKING:
    import torch
    from pyspark.sql import Column, DataFrame

    from sparkdl.model.saved_model import SavedModel
    from sparkdl.training.history import EpochRecord

T = TypeVar("T", bound="TorchModel")


class TorchModel(Model, _TorchParams, MLReadable["TorchModel"], MLWritable):
    """A trained torch module as a Spark ML model.

    ``transform`` adds the column ``predictionCol``: the class as a double for a loss over classes, 0.0 or 1.0
    for a binary loss, otherwise the module's output, a double or an array of doubles (in row-major order). Where the
    label column held strings, booleans or numbers that were indexed, it is those; ``predictionType`` names another
    type. Where ``probabilityCol`` and ``rawPredictionCol`` are named, it adds vectors with an entry for each class, in
    the order of ``labels``, which says what they are called. With several label columns each of these is a struct with
    a field for each, those two for each that predicts classes.

    A row with a null among its features has null in all of them, and so has one with NaN that the module answers with
    NaN; NaN for other rows is an error, as it is neither a class nor a number. Rows keep their order and all their
    columns; the module runs once per row, in Spark's Python workers, each of which loads it once; no job runs before
    the DataFrame is used. A streaming DataFrame stays one.

    Made by :meth:`sparkdl.estimators.TorchEstimator.fit` and by :meth:`load`.
    """

    def __init__(self, saved: SavedModel, summary: TrainingSummary | None = None) -> None:
        super().__init__()
        self._set_defaults()
        self._saved = saved
        self._summary = summary or TrainingSummary()
        self._scoring = ScoringModels(saved)

    def __repr__(self) -> str:
        return f"{type(self).__name__}: uid={self.uid}, module {type(self.module).__name__}"

    @property
    def module(self) -> torch.nn.Module:
        """The trained module, on CPU and in ``eval()`` mode."""
        return self._saved.module

    @property
    def saved(self) -> SavedModel:
        """The module together with what it takes and gives."""
        return self._saved

    @property
    def labels(self) -> list[Any] | dict[str, list[Any] | None] | None:
        """The labels of the classes, in the order of ``probabilityCol`` and ``rawPredictionCol``.

        Strings, booleans, or integers that were indexed. None where the column holds the numbers of the classes, so
        that entry ``i`` belongs to the label ``i``, and where the model predicts no classes. With several label columns
        a dict of that by their names.
        """
        by_name = {
            output.name: None if output.classes is None else list(output.classes)
            for output in self._saved.signature.outputs
        }
        return by_name if len(by_name) > 1 else next(iter(by_name.values()))

    @property
    def history(self) -> tuple[EpochRecord, ...]:
        """One record per epoch of the fit."""
        return self._summary.history

    @property
    def summary(self) -> TrainingSummary:
        """History and MLflow run of the fit."""
        return self._summary

    def write(self) -> MLWriter:
        """Return a writer: ``model.write().overwrite().save(path)``."""
        return TorchModelWriter(self)

    @classmethod
    def read(cls) -> MLReader[TorchModel]:
        """Return a reader; :meth:`load` is the shortcut."""
        return TorchModelReader(cls)

    def _logged_as(self: T, run_id: str | None, uri: str | None) -> T:
        """Note the run of the fit, and where MLflow has this model."""
        self._summary = replace(self._summary, run_id=run_id, model_uri=uri)
        return self

    def _transform(self, dataset: DataFrame) -> DataFrame:
        columns, outputs = scored_columns_of(self), self._saved.signature.outputs
        for column in columns:
            if column.name in dataset.columns:
                raise ParamError(
                    f"The DataFrame already has a column {column.name!r}. Drop it, or set another {column.param}."
                )
        check_scored_columns(columns, outputs)
        dataset = _row_by_row(dataset)
        fields = self._feature_fields(dataset)
        packing = packing_of([field.dataType for field in fields], self._saved.signature.inputs)
        scoring = self._scoring.for_session(dataset.sparkSession, self.predictionBatchSize.checked(self))
        predict = prediction_udf(scoring, columns, packing)
        if packing is None:
            scored = predict(*(_feature(dataset, field) for field in fields))
        else:
            scored = predict(packing.packed([field.name for field in fields]))
        if len(columns) == 1 and of_spark(columns[0], outputs, scored) is scored:
            return dataset.withColumn(columns[0].name, scored)
        # The model runs once, for a column of its own, out of which Spark takes all others.
        whole = f"_{self.uid}_scored"
        parts = {
            column.name: of_spark(
                column, outputs, F.col(whole) if len(columns) == 1 else F.col(whole)[column.answer]
            )
            for column in columns
        }
        return dataset.withColumn(whole, scored).withColumns(parts).drop(whole)

    def _feature_fields(self, dataset: DataFrame) -> list[StructField]:
        """The feature columns, with the types that the model takes them in."""
        names, expected = self.getFeaturesCols(), self._saved.signature.inputs.names
        if len(names) != len(expected):
            raise ParamError(
                f"Param featuresCol names {len(names)} columns, and the model was trained on {len(expected)}: "
                f"{', '.join(expected)}."
            )
        check_case(dataset, names)
        available, num_columns = {field.name: field for field in dataset.schema}, Counter(dataset.columns)
        fields = []
        for name, trained in zip(names, self._saved.signature.inputs.columns, strict=True):
            if name not in available:
                raise missing_column_error(name, dataset.columns)
            if num_columns[name] > 1:
                raise ambiguous_column_error(name, num_columns[name])
            field = available[name]
            if "number" in (trained.kind, *trained.element):  # as fits on decimals have them
                field = StructField(name, without_decimals(field.dataType))
            check_like(field, trained)
            fields.append(field)
        return fields


def _row_by_row(dataset: DataFrame) -> DataFrame:
    """Return the same rows such that Spark hands them on one by one and not as batches of columns.

    Where a table comes as columns, out of the cache or of Parquet, Spark (since 4.2; measured on 4.3) makes rows of
    them for a function of Python, and columns of its rows again: a quarter more time for the whole of ``transform``.
    Columns of Arrow alone, which some connectors give, would continue without rows to a function that is given them as
    they are. A filter takes rows. This one keeps them all, which Spark cannot know, and is compiled into what is
    around it.
    """
    return dataset.where(F.spark_partition_id() >= 0)


def _feature(dataset: DataFrame, field: StructField) -> Column:
    column = dataset[quoted(field.name)]
    if is_vector(field.dataType):
        # Under a condition, as it fails on a null, which gives null in all added columns.
        return F.when(column.isNotNull(), vector_to_array(column))
    return column.cast(field.dataType) if dataset.schema[field.name].dataType != field.dataType else column
