"""The Spark ML estimator, and the base of all estimators. Runs on the *driver*; the training runs on the ranks.

Every estimator fits on DataFrames and files, with one or more Param maps.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

from pyspark import keyword_only
from pyspark.ml import Estimator

from sparkdl.data.dataset.footers import urls_for_spark
from sparkdl.data.spark.reading import reading_job
from sparkdl.estimators.fit.fit import (
    FittedModels,
    TrialRun,
    check_rows_to_fit,
    fit_on_rows,
    with_param_maps,
)
from sparkdl.estimators.fit.inputs import named_columns
from sparkdl.estimators.fit.labels import label_faults
from sparkdl.estimators.fit.recipe import Recipe
from sparkdl.estimators.fit.rows import share_rows
from sparkdl.estimators.params.base import CheckedParams, check_param_map
from sparkdl.estimators.params.estimator import ClassArguments, _TorchEstimatorParams
from sparkdl.estimators.params.table import with_arguments
from sparkdl.estimators.persistence import SavedInFolder
from sparkdl.estimators.torch_model import TorchModel
from sparkdl.launch import active_session
from sparkdl.spark.jobs import jobs_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.ml.param import Param
    from pyspark.sql import DataFrame, SparkSession
    from typing_extensions import Unpack

    from sparkdl.data import Column, ParquetDataset
    from sparkdl.estimators.fit.rows import TrainingRows
    from sparkdl.estimators.fit.split import RowCounts
    from sparkdl.estimators.fit.tracking import NestedRun
    from sparkdl.estimators.learning_rate_search import LearningRates
    from sparkdl.estimators.summary import TrainingSummary
    from sparkdl.model.inputs import PrepareFunction
    from sparkdl.model.losses import LossFunction
    from sparkdl.model.saved_model import SavedModel
    from sparkdl.training.objective import UserStep
    from sparkdl.training.spec import AugmentFunction, OptimizerFactory


M = TypeVar("M", bound=TorchModel)


class FittingEstimator(Estimator[M], CheckedParams):
    """An estimator whose ``fit`` trains on ranks.

    A subclass defines :meth:`_check_values`, which checks its Params, and :meth:`_params_of_fit`, which returns the
    Params of a fit. A fit calls the other private methods and attributes of the estimator whose ``fit`` was called.

    Attributes:
        _model_class: class of the models that fits return.
        _learns: whether :meth:`_learn` makes the model and the function that prepares features from the rows.
        _vector_dtype: dtype in which Spark ML vectors are stored; None for the dtype that the model takes.
    """

    _model_class: type[M]
    _learns: ClassVar[bool] = False
    _vector_dtype: ClassVar[str | None] = None

    @abstractmethod
    def _check_values(self) -> None:
        """Check all Params, as far as that needs no data.

        Raises:
            ParamError: if a Param is missing or has a value that cannot work; the message says what it may be.
        """

    @abstractmethod
    def _params_of_fit(self) -> _TorchEstimatorParams:
        """Return the Params of one fit."""

    def _learn(
        self, params: _TorchEstimatorParams, dataset: ParquetDataset, spark: SparkSession | None
    ) -> Recipe:
        """Return what a fit with these Params trains; a ready-made estimator learns it from the written rows."""
        del dataset, spark
        return Recipe.of(params)

    def _nulls(self) -> dict[str, Any]:
        """Return the value in place of nulls, by the names of the columns that may have nulls."""
        return {}

    def _faults(self, features: Sequence[Column], labels: Sequence[Column]) -> Iterable[str]:
        """Return what is wrong with the types of columns, and what to do; their shapes are not known yet."""
        del features, labels
        return ()

    def _path_of_pretrained(self) -> str | None:
        """Return the path of the file or folder that this estimator reads initial weights from; None without one."""
        has_folder = self.hasParam("pretrained") and self.isSet("pretrained")
        return self.getOrDefault("pretrained") if has_folder else None

    def _columns_of_fit(self) -> list[tuple[Param[Any], Sequence[str]]]:
        """Return the columns of a DataFrame that a fit reads, with the Params that name them."""
        return named_columns(self._params_of_fit())

    def _plan_rows(self, dataset: DataFrame) -> tuple[_TorchEstimatorParams, RowCounts | None]:
        """Return the Params of a fit, and estimated row counts; None if it trains on the DataFrame's own rows."""
        del dataset
        return self._params_of_fit(), None

    @overload
    def fit(self, dataset: DataFrame, params: dict[Param[Any], Any] | None = None) -> M: ...

    @overload
    def fit(
        self, dataset: DataFrame, params: list[dict[Param[Any], Any]] | tuple[dict[Param[Any], Any]]
    ) -> list[M]: ...

    def fit(self, dataset: DataFrame, params: Any = None) -> Any:
        """Train on a DataFrame, once or for each of several Param maps.

        Args:
            dataset: DataFrame of classic Spark or Spark Connect.
            params: Param map whose values override those of the estimator, or a list of such maps, to fit one model
                for each map.

        Returns:
            The model; with a list of maps, a list of models.

        Raises:
            ParamError: if a Param has a value that cannot work, or belongs to another estimator.
            DataError: if rows or columns cannot be used.
            LaunchError: if the cluster cannot run the ranks.
            RankError: if a rank fails.
        """
        check_rows_to_fit(dataset)
        if isinstance(params, dict):
            check_param_map(self, params)
        return super().fit(dataset, params)

    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[Any]) -> FittedModels[M]:
        """Return a thread-safe iterator of ``(index, model)``, with a model for each Param map; rows are written once.

        Each call of ``next`` fits a model. If several threads call it at once, their fits run in parallel as far as the
        cluster has slots for their ranks, and otherwise one after the other.

        Raises:
            ParamError: if a map has a value that cannot work; the message says which map.
        """
        check_rows_to_fit(dataset)
        return FittedModels(dataset, with_param_maps(self, paramMaps))

    def fit_on_parquet(self, path: str | os.PathLike[str]) -> M:
        """Train on Parquet files in place, with the active Spark session.

        Args:
            path: folder or URL that Spark can read, and ranks can read by fsspec or pyarrow.

        Raises:
            LaunchError: if there is no active session; for other errors see :meth:`fit`.
            DataError: if the folder belongs to an Iceberg or Hudi table, or to a Delta table with deletion vectors,
                column mapping or partition columns, whose log says which rows are valid; or deltalake is missing.
            StoreError: if Spark lacks Hadoop's connector for the URL.
        """
        spark = active_session()
        urls = urls_for_spark(os.fspath(path))
        with jobs_of(f"fit {type(self).__name__}"), reading_job(spark, "opening the rows"):
            rows = spark.read.parquet(*urls)
            rows.columns  # noqa: B018 - makes Spark Connect open the files
        return self.fit(rows)

    def find_learning_rate(
        self, dataset: DataFrame, *, low: float = 1e-7, high: float = 1.0, num_updates: int = 100
    ) -> LearningRates:
        """Return the loss for growing learning rates, and the rate at which it falls most: a range test.

        The ranks take a few updates on some of the rows. Nothing is validated, logged or kept. The rates are those of
        the optimizer's first parameter group, before ``learningRateScaling``; others grow in proportion.

        Args:
            dataset: DataFrame as for :meth:`fit`.
            low: first learning rate.
            high: last learning rate.
            num_updates: number of updates of the weights, at least 10.

        Raises:
            ParamError: if an argument or a Param has a value that cannot work.
            SparkdlError: as :meth:`fit`.
        """
        from sparkdl.estimators.learning_rate_search import RangeSchedule, judge

        schedule = RangeSchedule(low, high, num_updates)
        check_rows_to_fit(dataset)
        trial = self.copy().setParams(
            fastDevRun=True,
            scheduler=schedule,
            schedulerInterval="step",
            warmupSteps=0,
            metrics=[],
        )
        for name in (
            "validationFraction",
            "validationIndicatorCol",
            "bestMetric",
            "bestMode",
            "earlyStoppingPatience",
            "onEpoch",
            "elastic",  # ranks that join would lack the losses
            "minWorkers",
            "maxWorkers",
            "replaceStragglers",
        ):
            trial.clear(trial.getParam(name))
        losses: list[tuple[float, float]] = []
        trial._fit_once(dataset, TrialRun(schedule.num_updates, losses.extend))
        return judge(losses)

    def _fit(self, dataset: DataFrame) -> M:
        return self._fit_once(dataset)

    def _fit_once(self, dataset: DataFrame, trial: TrialRun | None = None) -> M:
        """Fit on rows that no other fit shares; ``trial`` says what the fit does if fastDevRun is set."""
        self._check_values()
        (rows,) = share_rows(dataset, [self._params_of_fit()])
        return self._fit_rows(dataset, rows, trial=trial)

    def _fit_rows(
        self,
        dataset: DataFrame,
        rows: TrainingRows,
        nested: NestedRun | None = None,
        trial: TrialRun | None = None,
    ) -> M:
        """Fit on rows of a DataFrame that other fits may share; the Params have to be checked before."""
        with jobs_of(f"fit {type(self).__name__}"):
            return fit_on_rows(
                self._params_of_fit(),
                dataset.sparkSession,
                rows,
                self._make_model,
                nested=nested,
                trial=trial,
            )

    def _make_model(self, saved: SavedModel, summary: TrainingSummary) -> M:
        model = self._model_class(saved, summary)
        # As in all models of Spark ML: Param maps with the estimator's Params then apply to the model as well.
        model._resetUid(self.uid)
        return self._copyValues(model)


@with_arguments
class TorchEstimator(_TorchEstimatorParams, FittingEstimator[TorchModel], SavedInFolder["TorchEstimator"]):
    """Trains a torch module on the machines of a Spark cluster; ``fit`` returns a :class:`TorchModel`.

    Example::

        estimator = TorchEstimator(
            model=torch.nn.Linear(64, 10),
            optimizer="adamw",
            learningRate=1e-2,
            loss="cross_entropy",
            featuresCol="image",
            labelCol="digit",
            numWorkers=4,
        )
        model = estimator.fit(train)
        model.transform(test).select("prediction").show()
    """

    _model_class = TorchModel

    @keyword_only
    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: OptimizerFactory | str | None = None,
        learningRate: float | None = None,
        loss: LossFunction | str | Sequence[LossFunction | str] | None = None,
        trainStep: UserStep | None = None,
        initialWeights: str | None = None,
        featuresCol: str | Sequence[str] | None = None,
        passFeaturesBy: str | None = None,
        prepareFeatures: PrepareFunction | None = None,
        paddingValue: float | None = None,
        augment: AugmentFunction | None = None,
        labelCol: str | Sequence[str] | None = None,
        lossWeights: Sequence[float] | None = None,
        **params: Unpack[ClassArguments],
    ) -> None:
        super().__init__()
        self._set_arguments()

    def _params_of_fit(self) -> TorchEstimator:
        """Return the Params of one fit: this estimator."""
        return self

    def _faults(self, features: Sequence[Column], labels: Sequence[Column]) -> Iterable[str]:
        """Return what is wrong with the types of label columns; those of features are checked for all estimators."""
        del features
        return label_faults(self, labels)
