"""The Spark ML model that a fit returns. Runs on the *driver*; its predictions run on the executors."""

from __future__ import annotations

import html
import inspect
from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.ml import Model
from pyspark.sql import functions as F
from pyspark.sql.types import StructField

from sparkdl.data.dataset.dataset import missing_column_error
from sparkdl.data.spark.columns import (
    ambiguous_column_error,
    check_case,
    check_frame,
    check_like,
    check_session,
    quote,
    without_decimals,
)
from sparkdl.errors import ParamError, ParamTypeError, list_names
from sparkdl.estimators.params.estimator import _TorchParams
from sparkdl.estimators.params.inputs import scored_columns_of
from sparkdl.estimators.params.table import default_values, entries_of
from sparkdl.estimators.persistence import MODULE, SavedInFolder, read_metadata, restore, write_params
from sparkdl.estimators.scoring.columns import check_scored_columns, of_spark
from sparkdl.estimators.scoring.models import ScoringModels
from sparkdl.estimators.scoring.udf import convert_for_python, packing_of, prediction_udf
from sparkdl.estimators.summary import History, TrainingSummary, describe_values, html_facts
from sparkdl.lazy import load_entry
from sparkdl.model.decisions import with_thresholds
from sparkdl.model.saved_model import SavedModel, load_model, save_model
from sparkdl.spark.session import shares_gpus, threads_by_settings
from sparkdl.training.history import EpochRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike
    from pathlib import Path

    import torch
    from pyspark.sql import Column, DataFrame
    from torch.export import ExportedProgram

    from sparkdl.estimators.importances import FeatureImportances
    from sparkdl.model.inputs import PrepareFunction

T = TypeVar("T", bound="TorchModel")
C = TypeVar("C", bound="type[TorchModel]")


SETTABLE = (
    "featuresCol",
    "labelCol",
    "predictionCol",
    "probabilityCol",
    "rawPredictionCol",
    "predictionType",
    "predictionBatchSize",
    "thresholds",
    "weightCol",
)
"""Params that have an effect on a model; ``labelCol`` and ``weightCol`` on ``evaluate``."""


class NoSetter:
    """Stands for the setter of a Param that has no effect after a fit: the class has no such attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(
            f"{owner.__name__} has no {self._name}: this Param has no effect after a fit. Set it on the estimator."
        )


def without_idle_setters(made: C) -> C:
    """Take the setters of Params that have no effect from a class of models."""
    for entry in entries_of(made):
        name = entry.accessor("set")
        if entry.name not in SETTABLE and hasattr(made, name):
            setattr(made, name, NoSetter(name))
    return made


@without_idle_setters
class TorchModel(Model, _TorchParams, SavedInFolder["TorchModel"]):
    """A trained torch module as a Spark ML model.

    ``transform`` adds the column ``predictionCol``: the class as a double for a loss over classes, 0.0 or 1.0
    for a binary loss, otherwise the module's output, a double or an array of doubles (in row-major order). If labels
    were indexed, because the label column held strings, booleans or other numbers, predictions are the original labels.
    ``predictionType`` selects another type. If ``probabilityCol`` or ``rawPredictionCol`` is set, ``transform`` also
    adds a vector with one entry per class, in the order of ``labels``, which returns the labels of the classes. With
    several label columns each added column is a struct with a field per label column; in ``probabilityCol`` and
    ``rawPredictionCol`` only label columns with classes have a field.

    A row with a null among its features gets null in all added columns, unless the fit imputed nulls, and so does a
    row with NaN among its features for which the module returns NaN. NaN for any other row is an error. Rows keep their
    order and all their columns. The module runs once per row, in Spark's Python workers. Each worker loads it once. No
    job runs before the DataFrame is used. A streaming DataFrame stays a streaming DataFrame.

    Made by :meth:`sparkdl.estimators.TorchEstimator.fit`, :meth:`from_module`, :meth:`from_pretrained` and
    :meth:`load`.
    """

    def __init__(self, saved: SavedModel, summary: TrainingSummary | None = None) -> None:
        if not isinstance(saved, SavedModel):
            raise ParamTypeError(
                f"TorchModel cannot be made of a {type(saved).__name__} alone, as example rows show what goes into a "
                "module and what comes out. Call TorchModel.from_module(module, example=df, featuresCol=...)."
            )
        super().__init__()
        self._setDefault(**{**default_values(type(self)), "predictionBatchSize": saved.signature.batch_size})
        self._saved = saved
        self._summary = summary or TrainingSummary()
        self._scoring = ScoringModels(saved)

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Module | ExportedProgram | str | PathLike[str],
        *,
        example: DataFrame,
        outputs: str | Mapping[str, str] = "value",
        labels: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
        featuresCol: str | Sequence[str] = "features",
        passFeaturesBy: str | None = None,
        prepareFeatures: PrepareFunction | None = None,
        imageTransform: Callable[[Any], Any] | None = None,
        paddingValue: float | None = None,
        **params: Any,
    ) -> TorchModel:
        """Return a model for a module that was trained elsewhere, without a fit.

        The module is tried on example rows, as in a fit: this finds its inputs, their dtypes, and the shape of its
        outputs. The model can then do all that a fitted one can. It holds the module itself, on CPU and in
        ``eval()`` mode.

        Args:
            module: the trained module; a program of ``torch.export``; the path or URL of a file that
                ``torch.jit.save`` or ``torch.export.save`` wrote; or MLflow's URI of a model that ``mlflow.pytorch``
                logged, such as ``models:/name/1``.
            example: DataFrame with the feature columns. Up to 100 rows without nulls are read; they have to be like
                those to predict, so that arrays that may differ in length do so.
            outputs: meaning of the module's output: ``"value"``; ``"class"``, one score per class, whose softmax is
                the probabilities; ``"class_probability"``, these probabilities; ``"class_margin"``, scores that give
                none; ``"binary_logit"`` and ``"binary_probability"``, one number for the second of two classes. Of a
                dict that the module returns it is the entry ``logits``, of a tuple the first tensor. For another entry
                of a dict, a dict of meanings by name; for several outputs likewise, and of a tuple all, in its order.
            labels: labels of the classes, each once, in the order of the scores: strings, booleans or integers; None
                for their numbers. For several outputs a dict by the output's name.
            featuresCol: feature column, or a list of them.
            passFeaturesBy: as for :class:`~sparkdl.estimators.TorchEstimator`.
            prepareFeatures: function that makes the module's inputs of the columns.
            imageTransform: function that makes the module's input of one image, as the transforms of timm and
                torchvision do: it takes an image of Pillow in red, green and blue, and returns a tensor. The feature
                column then holds encoded images, or images of Spark's image source.
            paddingValue: value that pads arrays to the longest of a batch.
            params: further Params of the model, such as ``predictionCol``, ``probabilityCol`` and
                ``predictionBatchSize``.

        Raises:
            ParamTypeError: if ``module`` is none of these, or ``labels`` cannot be labels.
            ParamError: if there is no such file or logged model, an argument does not fit what the module returns for
                the example rows, such as ``"class"`` for probabilities that have been through a softmax, or
                a row's output depends on other rows.
            DataError: if the columns are missing, have no rows without nulls, or do not fit the module.
        """
        from sparkdl.estimators.given_module import describe_module  # with what fits need, which takes time

        saved = describe_module(
            module,
            example,
            outputs=outputs,
            labels=labels,
            imageTransform=imageTransform,
            featuresCol=featuresCol,
            passFeaturesBy=passFeaturesBy,
            prepareFeatures=prepareFeatures,
            paddingValue=paddingValue,
        )
        model = cls(saved).setParams(featuresCol=featuresCol, **params)
        check_scored_columns(scored_columns_of(model), model.saved.signature.outputs)
        return model

    @classmethod
    def from_pretrained(
        cls,
        pretrained: str,
        *,
        example: DataFrame,
        task: str | None = None,
        weights: str | None = None,
        revision: str | None = None,
        labels: Sequence[Any] | None = None,
        featuresCol: str | None = None,
        maxLength: int = 512,
        **params: Any,
    ) -> TorchModel:
        """Return a model for a trained network of Hugging Face, timm or torchvision, without a fit.

        Args:
            pretrained: id of a model on Hugging Face's hub, which huggingface_hub fetches to its cache; a local folder
                that ``save_pretrained`` of transformers or ``save_for_hf`` of timm wrote; or a network by its library
                and name, such as ``"timm:resnet18"`` or ``"torchvision:resnet18"``. It is read on the driver only.
            example: DataFrame with the column of texts or images, whose first rows the model is tried on.
            task: what is predicted, by the task's name in ``transformers.pipeline``; None for the task of the model's
                configuration. The tasks are:

                - ``"text-classification"``, also ``"sentiment-analysis"``, and ``"image-classification"``: one of the
                  labels in the model's configuration; a number if the model has one output; 0 or 1 for each label if
                  a row can have several.
                - ``"feature-extraction"``: an embedding of a text, the mean of the last layer's states over its tokens.
                - ``"image-feature-extraction"``: an embedding of an image.
                - ``"text-generation"``: the continuation of a text. The returned model is a
                  :class:`~sparkdl.estimators.LanguageModelModel`.
            weights: path of a local file with all weights of a network of timm or torchvision; None for the weights
                that the library fetches.
            revision: branch, tag or commit on the hub; None for its main branch.
            labels: labels of the classes in place of those that the model has.
            featuresCol: column of strings, or of encoded images or images of Spark's image source; default ``"text"``
                or ``"content"``.
            maxLength: number of tokens to which longer texts are cut; at most what the model takes.
            params: as for :meth:`from_module`; for ``"text-generation"`` also ``maxNewTokens``, ``temperature``,
                ``topK`` and ``output``.

        Raises:
            ParamError: if a library is not installed, there is no such model or it was trained for another task, or
                an argument is not valid.
            DataError: if the column is missing or holds no texts or images.
        """
        networks = load_entry("TorchModel.from_pretrained")
        source = networks.find_source(pretrained, task=task, revision=revision)
        column = featuresCol or ("content" if source.task in networks.TASKS_OF_IMAGES else "text")
        if source.task == networks.GENERATION:
            for name, value in (("labels", labels), ("weights", weights)):
                if value is not None:
                    raise ParamError(
                        f"{name} is {value!r}, and {pretrained!r} continues texts. Leave it out."
                    )
            language = load_entry("TorchModel.from_pretrained for text generation")
            generating: TorchModel = language.model_of_folder(
                source.name, example, featuresCol=column, maxLength=maxLength, **params
            )
            return generating
        trained = networks.load_trained(source, column=column, max_length=maxLength, weights=weights)
        return cls.from_module(
            trained.network,
            example=example,
            outputs=trained.kind,
            labels=trained.labels if labels is None else labels,
            featuresCol=column,
            prepareFeatures=trained.prepare,
            **params,
        )

    def __dir__(self) -> list[str]:
        kind = type(self)
        return [
            name
            for name in super().__dir__()
            if not isinstance(inspect.getattr_static(kind, name, None), NoSetter)
        ]

    def __repr__(self) -> str:
        return f"{type(self).__name__}: uid={self.uid}, module {type(self.module).__name__}"

    def _repr_html_(self) -> str:
        names, outputs, uri = (
            self._saved.signature.inputs.names,
            self.saved.signature.outputs,
            self.summary.model_uri,
        )
        number = sum(parameter.numel() for parameter in self.module.parameters())
        facts = {
            "network": f"{type(self.module).__name__}, {number:,} parameters",
            "takes": list_names(names),
            "predicts": ", ".join(f"{output.name} ({output.kind.replace('_', ' ')})" for output in outputs),
            "adds": ", ".join(column.name for column in scored_columns_of(self)),
            **({"fit": describe_values(self.summary)} if self.history else {}),
            **({} if uri is None else {"MLflow": uri}),
        }
        epochs = f"<details><summary>epochs</summary>{self.summary._repr_html_()}</details>"
        return (
            f"<strong>{type(self).__name__}</strong>{html_facts(facts)}"
            f"<details><summary>network</summary><pre>{html.escape(str(self.module))}</pre></details>"
            f"{epochs if self.history else ''}"
        )

    @property
    def module(self) -> torch.nn.Module:
        """The trained module, on CPU and in ``eval()`` mode."""
        return self._saved.module

    @property
    def saved(self) -> SavedModel:
        """The module together with its signature, which has the Params ``thresholds`` and ``predictionBatchSize``."""
        outputs = with_thresholds(self._saved.signature.outputs, self.getThresholds())
        return self._saved.with_signature(outputs=outputs, batch_size=self.getPredictionBatchSize())

    @property
    def labels(self) -> list[Any] | dict[str, list[Any] | None] | None:
        """The labels of the classes, in the order of ``probabilityCol`` and ``rawPredictionCol``.

        They are strings, booleans, or integers that were indexed. None if the column holds the numbers of the classes,
        so that entry ``i`` belongs to the label ``i``, or if the model does not predict classes. With several label
        columns a dict of these values, by label column.
        """
        by_name = {
            output.name: None if output.classes is None else list(output.classes)
            for output in self._saved.signature.outputs
        }
        return by_name if len(by_name) > 1 else next(iter(by_name.values()))

    @property
    def history(self) -> History:
        """One record per epoch of the fit."""
        return History(self._summary.history)

    @property
    def summary(self) -> TrainingSummary:
        """History and MLflow run of the fit."""
        return self._summary

    def evaluate(self, dataset: DataFrame, name: str | None = "test") -> Any:
        """Return how good the predictions for labelled rows are, as models of Spark ML do.

        The result is a :class:`~sparkdl.estimators.ClassificationEvaluation` for classes, and a
        :class:`~sparkdl.estimators.RegressionEvaluation` for numbers. Its names are those of Spark ML's summaries:
        ``accuracy``, ``recallByLabel``, ``roc``, ``rootMeanSquaredError`` and so on. The model runs once, and Spark
        sums on the executors. Rows are weighted by ``weightCol`` if it is set.

        Args:
            dataset: DataFrame with the feature columns and ``labelCol``.
            name: prefix of the names of metrics and picture in the fit's MLflow run; None to log nothing. A model
                without such a run logs nothing either.

        Returns:
            The evaluation; with several label columns, a dict of evaluations by label column.

        Raises:
            DataError: if a column is missing, no row has both a label and a prediction, or rows are of files that a
                table has removed.
            ParamError: if the model predicts arrays or texts.
        """
        from sparkdl.estimators.evaluation import evaluate

        return evaluate(self, dataset, name)

    def export(
        self, path: str | PathLike[str], *, example: DataFrame | None = None, format: str | None = None
    ) -> None:
        """Write the module to a file for other programs: ONNX, or a program of ``torch.export``.

        The file takes any number of rows: ONNX the module's inputs under their names, a program of ``torch.export``
        the inputs by position, in their order. It returns the module's outputs: scores for classes, in the order of
        ``labels``. It is tried on example rows, together and each alone, and must compute what the module
        does. It does not hold ``prepareFeatures``, nor a tokenizer or transform.

        Args:
            path: path or URL of the file, which is replaced if there is one.
            example: DataFrame with the feature columns; None for two rows that the fit, or ``from_module``, has seen,
                and whose inputs are saved with the model. If arrays differ in length, or inputs by what prepares them,
                the rows have to show it.
            format: ``"onnx"``, which needs the extra ``onnx``, or ``"export"``; None for the one that the path ends
                with, ``.onnx`` or ``.pt2``.

        Raises:
            ParamError: if the format is unknown, a library is missing, the model continues texts or is TorchScript, or
                it keeps no rows and none are given.
            SerializationError: if torch cannot export the module, or the file computes something else.
            DataError: if columns are missing, or do not fit the model.
            StoreError: if the file cannot be written.
        """
        from sparkdl.estimators.given_module import export_to  # with what fits need, which takes time

        if example is not None:
            check_frame(example, "TorchModel.export")
        export_to(path, self.saved, None if example is None else self._select_features(example), format)

    def featureImportances(
        self,
        dataset: DataFrame,
        *,
        metric: str | None = None,
        num_rows: int = 10_000,
        num_repeats: int = 5,
        seed: int = 0,
    ) -> FeatureImportances:
        """Return how much worse the predictions are if each feature is shuffled among the rows.

        The model predicts rows on the driver, ``(features * num_repeats + 1)`` times; features are columns, and each
        element of vectors and arrays of one length. Features that carry the same information each look unimportant,
        as the model still has the others. Rows with nulls are left out, except among features whose nulls the fit
        imputed.

        Args:
            dataset: DataFrame with the feature columns, ``labelCol`` and ``weightCol``, if that is set.
            metric: name of a metric of :meth:`evaluate`, such as ``areaUnderPR`` for a rare class; None for
                ``accuracy`` of classes and ``r2`` of numbers.
            num_rows: maximum number of rows, drawn at random.
            num_repeats: number of times each feature is shuffled.
            seed: seed of the drawn rows and the shuffling.

        Raises:
            DataError: if a column is missing, no row can be predicted, or rows are of files that a table has removed.
            ParamError: if the model predicts several columns, arrays or texts, or has no such metric.
        """
        from sparkdl.estimators.importances import measure_importances

        return measure_importances(
            self, dataset, metric=metric, num_rows=num_rows, num_repeats=num_repeats, seed=seed
        )

    def _write_folder(self, folder: Path) -> None:
        summary = self.summary
        extra = {
            "history": [asdict(record) for record in summary.history],
            "modelEpoch": summary.model_epoch,
            "runId": summary.run_id,
            "modelUri": summary.model_uri,
            "numParameters": summary.num_parameters,
            "numTrainedParameters": summary.num_trained_parameters,
        }
        write_params(self, folder, extra)
        try:
            saved = self.saved
        except ParamError:  # thresholds of another model: transform says so, and saving keeps them
            saved = self._saved.with_signature(batch_size=self.getPredictionBatchSize())
        save_model(saved, folder / MODULE)

    def _without_examples(self) -> TorchModel:
        """Return a copy that does not keep the inputs of example rows."""
        bare: TorchModel = self.copy()
        bare._saved = replace(self._saved, examples=())
        return bare

    @classmethod
    def _read_folder(cls, folder: Path) -> TorchModel:
        metadata = read_metadata(folder, cls)
        summary = TrainingSummary(
            history=tuple(EpochRecord.from_dict(record) for record in metadata.get("history", ())),
            model_epoch=metadata.get("modelEpoch"),
            run_id=metadata.get("runId"),
            model_uri=metadata.get("modelUri"),
            num_parameters=metadata.get("numParameters", 0),
            num_trained_parameters=metadata.get("numTrainedParameters", 0),
        )
        saved = load_model(folder / MODULE)
        # The folder has the thresholds for what reads it without Params.
        model = cls(saved.with_signature(outputs=with_thresholds(saved.signature.outputs, None)), summary)
        restore(model, metadata, folder)
        return model

    def _note_run(self: T, run_id: str | None, uri: str | None) -> T:
        """Record the run of the fit and the URI of this model in MLflow in the summary."""
        self._summary = replace(self._summary, run_id=run_id, model_uri=uri)
        return self

    def _transform(self, dataset: DataFrame) -> DataFrame:
        check_session(dataset, "transform")
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
        session = dataset.sparkSession
        scoring = self._scoring.for_session(
            session,
            self.predictionBatchSize.checked_value(self),
            threads_by_settings(session),
            shares_gpu=shares_gpus(session),
        ).predicting(self.saved.signature)
        predict = prediction_udf(scoring, columns, packing, [field.dataType for field in fields])
        if packing is None:
            keeps_nulls = self._saved.signature.inputs.take_nulls
            scored = predict(*(_feature(dataset, field, keeps_nulls=keeps_nulls) for field in fields))
        else:
            scored = predict(packing.pack([field.name for field in fields]))
        if len(columns) == 1 and of_spark(columns[0], outputs, scored) is scored:
            return dataset.withColumn(columns[0].name, scored)
        # The model runs once, for a temporary column, from which Spark takes all added columns.
        scores = f"_{self.uid}_scored"
        parts = {
            column.name: of_spark(
                column, outputs, F.col(scores) if len(columns) == 1 else F.col(scores)[column.answer]
            )
            for column in columns
        }
        return dataset.withColumn(scores, scored).withColumns(parts).drop(scores)

    def _select_features(self, dataset: DataFrame, *more: Column) -> DataFrame:
        """The feature columns with the types that the model accepts, and what is given, without other columns."""
        fields = self._feature_fields(dataset)
        return dataset.select(*[F.col(quote(field.name)).cast(field.dataType) for field in fields], *more)

    def _feature_fields(self, dataset: DataFrame) -> list[StructField]:
        """The fields of the feature columns, with the types that the model accepts."""
        names, expected = self.getFeaturesCols(), self._saved.signature.inputs.names
        if len(names) != len(expected):
            raise ParamError(
                f"Param featuresCol names {len(names)} columns, and the model was trained on {len(expected)}: "
                f"{list_names(expected)}."
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
            if "number" in (trained.kind, *trained.element):  # a fit casts decimals to doubles, too
                field = StructField(name, without_decimals(field.dataType))
            check_like(field, trained)
            fields.append(field)
        return fields


def _row_by_row(dataset: DataFrame) -> DataFrame:
    """Return the same rows in a plan that makes Spark pass them on row by row, not as columnar batches.

    If a table is columnar, from the cache or from Parquet, Spark (since 4.2; measured on 4.3) converts it to rows for a
    Python function, and its rows to columns again: ``transform`` as a whole takes a quarter more time. Only Arrow
    columns, which some connectors provide, would go to a Python function without the conversion, if it takes them
    unchanged. A filter works on rows. This filter keeps all rows, which Spark cannot know, and is compiled into the
    surrounding stage.
    """
    return dataset.where(F.spark_partition_id() >= 0)


def _feature(dataset: DataFrame, field: StructField, *, keeps_nulls: bool) -> Column:
    column = dataset[quote(field.name)]
    if dataset.schema[field.name].dataType != field.dataType:
        column = column.cast(field.dataType)
    return convert_for_python(column, field.dataType, keeps_nulls=keeps_nulls)
