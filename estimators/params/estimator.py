"""The Params of the estimator and its model, combined from the groups of the table; checks across Params."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, cast

from sparkdl.collective import check_transport, uses_mpi
from sparkdl.errors import ParamError
from sparkdl.estimators.params.base import CheckedParams
from sparkdl.estimators.params.inputs import (
    HasFeatureColumns,
    HasLabelColumns,
    HasLabels,
    HasModelInputs,
    HasPrediction,
    HasRowColumns,
    HasScoredColumns,
    check_validation,
    labels_by_column,
    scored_columns_of,
)
from sparkdl.estimators.params.running import HasCheckpoints, HasRanks, HasRows, HasTracking
from sparkdl.estimators.params.table import check_entries, check_of, entries_of
from sparkdl.estimators.params.training import (
    HasFunctions,
    HasObjective,
    HasTraining,
    best_goal_of,
    num_readers,
)
from sparkdl.model.architecture import check_has_values
from sparkdl.tracking.logged_model import check_registration
from sparkdl.training.spec import DRAWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pyspark.ml.param import Param

    from sparkdl.data import Store
    from sparkdl.estimators.params.inputs import Labels
    from sparkdl.estimators.torch_estimator import FittingEstimator
    from sparkdl.monitor import Monitor
    from sparkdl.parallel import Parallelism
    from sparkdl.slow_links import Compression, Synchronization
    from sparkdl.training.callbacks import Callback
    from sparkdl.training.history import EpochRecord
    from sparkdl.training.learning_rate import SchedulerFactory
    from sparkdl.training.metrics import Metric


class _SharedParams(
    HasFeatureColumns,
    HasPrediction,
    HasRowColumns,
    HasTraining,
    HasRanks,
    HasRows,
    HasCheckpoints,
    HasTracking,
    CheckedParams,
):
    """Params that all estimators and their models share; their values can be written as JSON."""


class _TorchParams(HasScoredColumns, HasLabelColumns, _SharedParams):
    """Params that the estimator and its model share."""


class SharedArguments(TypedDict, total=False):
    """Arguments that the constructors of all estimators have; None leaves a Param as it is."""

    batchSize: int | None
    globalBatchSize: int | None
    epochs: int | None
    fastDevRun: bool | None
    seed: int | None
    predictionCol: str | None
    weightCol: str | None
    validationIndicatorCol: str | None
    validationFraction: float | None
    metrics: Sequence[str] | Mapping[str, Metric | str] | None
    earlyStoppingPatience: int | None
    earlyStoppingMinDelta: float | None
    bestMetric: str | None
    bestMode: str | None
    callbacks: Sequence[Callback] | None
    onEpoch: Callable[[EpochRecord], object] | None
    scheduler: SchedulerFactory | str | None
    schedulerInterval: str | None
    learningRateScaling: str | None
    warmupSteps: int | None
    gradientAccumulationSteps: int | None
    maxGradNorm: float | None
    precision: str | None
    syncBatchNorm: bool | None
    compileModel: bool | None
    compareReplicas: bool | None
    deterministic: bool | None
    numWorkers: int | None
    gpusPerWorker: int | None
    threadsPerWorker: int | None
    parallelism: Parallelism | Mapping[str, Any] | str | None
    balance: str | None
    stragglerFactor: float | None
    stragglerSeconds: float | None
    replaceStragglers: bool | None
    synchronization: Synchronization | Mapping[str, Any] | None
    compression: Compression | Mapping[str, Any] | None
    shuffle: bool | None
    cache: str | None
    store: Store | str | None
    keepRowsSeconds: float | None
    checkpointDir: str | None
    checkpointEverySteps: int | None
    keepCheckpoints: int | None
    maxRestarts: int | None
    minWorkers: int | None
    elastic: bool | None
    maxWorkers: int | None
    communicationRetries: int | None
    hangTimeoutSeconds: float | None
    transport: str | None
    wire: str | None
    tracking: str | None
    experiment: str | None
    runName: str | None
    trackingTimeoutSeconds: float | None
    registeredModelName: str | None
    registeredModelAlias: str | None
    logCheckpoints: bool | None
    showProgress: bool | None
    logFormat: str | None
    monitor: Monitor | Mapping[str, Any] | None
    predictionBatchSize: int | None


class ClassArguments(SharedArguments, total=False):
    """Arguments that the constructors of all classifiers have."""

    labels: Labels | Sequence[Labels | None] | None
    classWeights: Sequence[float] | Mapping[Any, float] | str | None
    sampling: str | None
    thresholds: Sequence[float] | None
    probabilityCol: str | None
    rawPredictionCol: str | None
    predictionType: str | None


class _TorchEstimatorParams(_TorchParams, HasLabels, HasModelInputs, HasObjective, HasFunctions):
    """Params of the estimator: the shared Params, how the model is called, and Params that hold Python objects."""

    _made_for: FittingEstimator[Any] | None = None
    """The estimator for whose fit another estimator has made these Params; None for an estimator of the user."""

    @property
    def _caller(self) -> FittingEstimator[Any]:
        """The estimator whose ``fit`` was called."""
        return self._made_for or cast("FittingEstimator[Any]", self)

    def _label_names(self) -> list[str]:
        """Return the label columns; with a trainStep only if they were set, because it may need none."""
        if self.getTrainStep() is not None and not self.isSet(self.labelCol):
            return []
        return self.getLabelCols()

    def _object_params(self) -> list[Param[Any]]:
        """Return the Params that are set and hold a Python object, such as a module or a function."""
        return [entry for entry in entries_of(self) if entry.holds_object and self.isSet(entry)]

    def _path_of_initial_weights(self) -> str | None:
        """Return the path or URL of the file or folder that a fit reads its initial weights from; None if it has none.

        Of an estimator that reads the weights itself, or copies the folder, that is the original one.
        """
        weights = self.getInitialWeights()
        return self._caller._path_of_pretrained() or (None if weights == DRAWN else weights)

    def _metric_names(self, metrics: Iterable[str]) -> list[str]:
        """Return the names of all losses and metrics that a fit with these metrics has."""
        names = ["loss", *metrics]
        has_validation = self.isSet(self.validationIndicatorCol) or self.isSet(self.validationFraction)
        return [*names, *(f"val_{name}" for name in names)] if has_validation else names

    def _check_values(self) -> None:
        """Check all Params, as far as that needs no data.

        Raises:
            ParamError: if a Param is missing or has a value that cannot work; the message says what it may be.
        """
        self._check_presence()
        self._check_settings()

    def _check_settings(self) -> None:
        """Check the Params that are set, individually and in combination.

        Raises:
            ParamError: if a value cannot work; the message names the Param, its value and what it may be.
        """
        check_entries(self)
        if self.isSet(self.model) and self.getInitialWeights() is None:
            with check_of("model"):
                check_has_values(self.getModel(), "Param model")
        with check_of("transport", "wire"):
            check_transport(self.getTransport(), self.getWire())
        with check_of("predictionCol", "probabilityCol", "rawPredictionCol"):
            scored_columns_of(self)
        if self.getTrainStep() is None:
            with check_of("labels", "labelCol"):
                labels_by_column(self.getLabels(), self._label_names())
        with check_of("validationFraction", "validationIndicatorCol"):
            check_validation(self)
        with check_of("bestMetric", "bestMode"):
            best_goal_of(self, self._metric_names(self.getMetrics()))
        if self.getRegisteredModelAlias() is not None and self.getRegisteredModelName() is None:
            raise ParamError(
                f"Param registeredModelAlias is {self.getRegisteredModelAlias()!r}: {self.registeredModelAlias.doc}."
            ).about("registeredModelAlias")
        with check_of("registeredModelName", "registeredModelAlias"):
            check_registration(self.getRegisteredModelName(), self.getRegisteredModelAlias())
        if self.getLogCheckpoints() and self.getCheckpointDir() is None:
            raise ParamError(f"Param logCheckpoints is True: {self.logCheckpoints.doc}.").about(
                "logCheckpoints"
            )
        parallelism = self.getParallelism()
        if parallelism is not None and not isinstance(parallelism, str):
            with check_of("parallelism", "numWorkers"):
                parallelism.resolve(self.getNumWorkers())
        if not 1 <= self.getMinWorkers() <= self.getNumWorkers():
            raise ParamError(
                f"Param minWorkers is {self.getMinWorkers()} and numWorkers {self.getNumWorkers()}: "
                f"{self.minWorkers.doc}."
            ).about("minWorkers", "numWorkers")
        self._check_batch_size()
        self._check_contradictions()
        self._check_elastic()

    def _check_contradictions(self) -> None:
        """Refuse pairs of settings that exclude each other."""
        synchronization, compression = self.getSynchronization(), self.getCompression()
        is_by_speed, watches = self.getBalance() != "equal", self.getStragglerFactor() is not None
        is_divided, has_gpus = self.getParallelism() is not None, self.getGpusPerWorker() > 0
        averages_weights, compresses = synchronization is not None, compression is not None
        has_norm_on_gpus = self.getSyncBatchNorm() and has_gpus
        slow = "synchronization" if averages_weights else "compression"
        has_slow = averages_weights or compresses
        needs_native = compresses or (
            synchronization is not None
            and (bool(synchronization.begin_after) or synchronization.group != "rank")
        )
        waits = "ranks wait for each other in the forward pass, whose time is the measure of their speed"
        for name, other, contradicts, why in (
            (
                "balance",
                "parallelism",
                is_by_speed and is_divided,
                "ranks that share a model also share their rows, or wait for each other within a step",
            ),
            (
                "balance",
                "deterministic",
                is_by_speed and self.getDeterministic(),
                "the rows of a rank follow its speed, which is never the same twice",
            ),
            ("balance", "syncBatchNorm", is_by_speed and has_norm_on_gpus, f"on GPUs, {waits}"),
            (
                "stragglerFactor",
                "parallelism",
                watches and is_divided,
                "ranks that share a model wait for each other within a step, and their parts of it take different "
                "times",
            ),
            ("stragglerFactor", "syncBatchNorm", watches and has_norm_on_gpus, f"on GPUs, {waits}"),
            (
                "synchronization",
                "compression",
                averages_weights and compresses,
                "ranks that update their own weights send no gradients",
            ),
            (
                slow,
                "balance",
                averages_weights and is_by_speed,
                "ranks with more rows would not count more in the average of weights",
            ),
            (
                slow,
                "stragglerFactor",
                averages_weights and watches,
                "it makes the ranks wait for each other every two seconds",
            ),
            (
                slow,
                "parallelism",
                has_slow and is_divided,
                "ranks that have parts of a model need each other in each step",
            ),
            (
                slow,
                "precision",
                has_slow and self.getPrecision() == "float16",
                "the losses of float16 are scaled by all ranks together; choose 'bfloat16'",
            ),
            (
                slow,
                "syncBatchNorm",
                averages_weights and self.getSyncBatchNorm(),
                "it takes statistics over the rows of all ranks in each step",
            ),
            (
                slow,
                "gpusPerWorker",
                has_gpus and needs_native,
                "on GPUs gradients are averaged by NCCL, uncompressed, over all ranks: only synchronization with group "
                "'rank' and begin_after 0 is supported there",
            ),
        ):
            if contradicts:
                value = self.getOrDefault(self.getParam(name))
                shown = f" to {value!r}" if isinstance(value, str) else ""
                raise ParamError(
                    f"Param {name} is set{shown}, and so is {other}: {why}. Leave one of them out."
                ).about(name, other)
        if is_by_speed and self.getBatchSize() == 1:
            raise ParamError(
                "Param balance is 'speed', and each rank has one row of a step, so no row can be moved from slow ranks "
                "to fast ones. Use a larger batch."
            ).about("balance", "batchSize", "globalBatchSize")
        if self.getReplaceStragglers() and not (watches and self.getElastic()):
            raise ParamError(
                "Param replaceStragglers is True, which needs a stragglerFactor, that says which ranks are replaced, "
                "and elastic=True."
            ).about("replaceStragglers", "stragglerFactor", "elastic")

    def _check_batch_size(self) -> None:
        rows = self.getGlobalBatchSize()
        if rows is None:
            return
        if self.isSet(self.batchSize):
            raise ParamError(
                f"Params batchSize and globalBatchSize are both set, to {self.getOrDefault(self.batchSize)} and "
                f"{rows}. Leave one of them out."
            ).about("batchSize", "globalBatchSize")
        readers, num_ranks = num_readers(self), self.getNumWorkers()
        if rows % readers:
            near = max(1, round(rows / readers)) * readers
            shared = f" with {readers} ranks that read rows of their own" if readers < num_ranks else ""
            raise ParamError(
                f"Param globalBatchSize is {rows}, which numWorkers, {num_ranks}{shared}, does not divide. Set it to "
                f"{near}, for example."
            ).about("globalBatchSize", "numWorkers")

    def _check_elastic(self) -> None:
        num_ranks, most = self.getNumWorkers(), self.getMaxWorkers()
        if not self.getElastic():
            if self.isSet(self.maxWorkers):
                raise ParamError(
                    f"Param maxWorkers is {most}, and the fit is not elastic. Set elastic=True, or leave maxWorkers "
                    "out."
                ).about("maxWorkers", "elastic")
            return
        if most < num_ranks:
            raise ParamError(
                f"Param maxWorkers is {most} and numWorkers {num_ranks}: {self.maxWorkers.doc}."
            ).about("maxWorkers", "numWorkers")
        if uses_mpi(self.getTransport()):
            raise ParamError(
                f"Param transport is {self.getTransport()!r}, and the fit is elastic: no rank can leave or join an MPI "
                "world. Leave transport out, or elastic."
            ).about("transport", "elastic")
        parallelism = self.getParallelism()
        if isinstance(parallelism, str):
            raise ParamError(
                "Param parallelism is 'auto', and the fit is elastic, in which the ranks of a replica are known before "
                "they start. Name the layout, such as {'shard': 2}, or leave one of them out."
            ).about("parallelism", "elastic")
        if parallelism is not None:
            self._check_replicas(parallelism)
        if self.getPrecision() == "float8":
            raise ParamError(
                "Param precision is 'float8', and the fit is elastic, which float8 cannot be. Choose 'bfloat16', or "
                "leave elastic out."
            ).about("precision", "elastic")

    def _check_replicas(self, parallelism: Parallelism) -> None:
        """Check that an elastic fit with a divided model has replicas, which come and go as a whole."""
        if parallelism.data not in (None, -1):
            raise ParamError(
                f"Param parallelism has data={parallelism.data}, and the fit is elastic, in which the number of "
                "replicas changes. Leave data out."
            ).about("parallelism", "elastic")
        try:
            size = parallelism.num_ranks_of_replica
        except ParamError as error:
            raise ParamError(
                f"{error} In an elastic fit, replicas of the model come and go; without them, use maxRestarts in place "
                "of elastic: the fit then restarts from its last checkpoint."
            ).about("parallelism", "elastic") from None
        for param, number in (
            (self.minWorkers, self.getMinWorkers()),
            (self.numWorkers, self.getNumWorkers()),
            (self.maxWorkers, self.getMaxWorkers()),
        ):
            if number % size and (param is not self.minWorkers or self.isSet(param)):
                raise ParamError(
                    f"Param {param.name} is {number}, and each replica of the model has {size} ranks (parallelism). "
                    f"In an elastic fit replicas come and go as a whole: set it to a multiple of {size}."
                ).about(param.name, "parallelism")

    def _check_presence(self) -> None:
        needed: list[Param[Any]] = [self.model, self.optimizer]
        if self.getTrainStep() is None:
            needed.append(self.loss)
        for forbidden, advice in (
            (self.loss, "The loss is what trainStep returns"),
            (self.labels, "A step gets labels as the column holds them"),
            (self.lossWeights, "Weigh the losses in trainStep"),
            (self.classWeights, "Weigh the rows in trainStep"),
            (self.sampling, "Repeat rows in the DataFrame, or weigh them in trainStep"),
        ):
            if self.getTrainStep() is not None and self.isSet(forbidden):
                raise ParamError(
                    f"Params {forbidden.name} and trainStep are both set. {advice}: leave {forbidden.name} out."
                ).about(forbidden.name, "trainStep")
        for param in needed:
            if not self.isDefined(param):
                raise ParamError(f"Param {param.name} is not set. It takes: {param.doc}.")
        if self.getLearningRate() is not None and not isinstance(self.getOrDefault(self.optimizer), str):
            raise ParamError(
                f"Param learningRate is {self.getLearningRate():g}, and the function of Param optimizer has its own. "
                "Leave one of them out, or name the optimizer, such as 'adamw'."
            ).about("learningRate", "optimizer")
