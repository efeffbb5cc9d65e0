"""Entries of the table of Params for where and how a fit runs: ranks, rows, checkpoints, restarts, and MLflow."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pyspark.ml.param import Param, Params, TypeConverters

from sparkdl.collective import TRANSPORTS, WIRES
from sparkdl.data import Store
from sparkdl.data.store.store import KEEP_FOR
from sparkdl.errors import ParamError, did_you_mean
from sparkdl.estimators.params.base import OneOf, ParamsT
from sparkdl.estimators.params.table import Entry, at_least, between, optional, param
from sparkdl.launch.hangs.watch import MIN_HANG_TIMEOUT_S
from sparkdl.lazy import load_entry
from sparkdl.slow_links import COMPRESSIONS, SYNCHRONIZATIONS, as_dict, settings_of
from sparkdl.training.spec import BALANCES

if TYPE_CHECKING:
    from sparkdl.monitor import Monitor
    from sparkdl.parallel import Parallelism
    from sparkdl.slow_links import Compression, Synchronization


def _to_url(value: Any) -> str:
    if isinstance(value, os.PathLike):
        return TypeConverters.toString(os.fspath(value))
    return value.url if isinstance(value, Store) else TypeConverters.toString(value)


AUTO: Literal["auto"] = "auto"
"""Value of Param ``parallelism`` for a layout that the planner chooses."""


def _to_parallelism(value: Any) -> dict[str, Any] | str:
    if value == AUTO:
        return AUTO
    sizes = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    if not isinstance(sizes, Mapping):
        raise TypeError(
            "it takes a sparkdl.parallel.Parallelism, a dict such as {'shard': 4}, or 'auto', not "
            + (repr(value) if isinstance(value, str) else f"a {type(value).__name__}")
        )
    made, plain = _parallelism(sizes), _parallelism({})
    return {name: value for name, value in asdict(made).items() if value != getattr(plain, name)}


def _parallelism(sizes: Mapping[str, Any]) -> Parallelism:
    from sparkdl.parallel import Parallelism  # with torch's device meshes, which few fits need

    unknown = [name for name in sizes if name not in Parallelism.__dataclass_fields__]
    if unknown:
        known = list(Parallelism.__dataclass_fields__)
        hint = did_you_mean(unknown[0], known, otherwise=f"It takes {', '.join(known)}.", show=repr)
        raise ParamError(f"Param parallelism has no size {unknown[0]!r}. {hint}")
    return Parallelism(**sizes)


def _to_monitor(value: Any) -> dict[str, Any]:
    kind: type[Monitor] = load_entry("Param monitor").Monitor
    if isinstance(value, kind):
        return value.as_dict()
    if not isinstance(value, Mapping):
        raise TypeError(
            f"it takes a sparkdl.monitor.Monitor, or a dict such as {{'seconds': 5}}, not a {type(value).__name__}"
        )
    return kind.from_dict(value).as_dict()


def _to_settings(value: Any, *, kinds: tuple[type[Any], ...], example: str) -> dict[str, Any]:
    """Convert a value of one of several classes, or a dict, to a dict of its settings."""
    if isinstance(value, kinds):
        return as_dict(value)
    if not isinstance(value, Mapping):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(
            f"it takes a {names} of sparkdl.torch, or a dict such as {example}, not a {type(value).__name__}"
        )
    return as_dict(settings_of(value, kinds))


def _check_filled(param: Param[Any], value: str) -> None:
    if not value.strip():
        raise ParamError(f"Param {param.name} is {value!r}, an empty name. Give it a name, or do not set it.")


class HasRanks(Params):
    """Params for the ranks of a fit and how they communicate."""

    numWorkers, getNumWorkers, setNumWorkers = param(
        TypeConverters.toInt,
        "number of ranks that train together, each in one slot of the cluster (> 0)",
        default=1,
        check=at_least(1),
    )
    gpusPerWorker, getGpusPerWorker, setGpusPerWorker = param(
        TypeConverters.toInt,
        "number of GPUs of each rank: 0 to train on CPU, 1 to train on a GPU",
        default=0,
        check=between(0, 2, has_low=True),
    )
    threadsPerWorker, getThreadsPerWorker, setThreadsPerWorker = optional(
        TypeConverters.toInt,
        "number of threads in which each rank computes (> 0); default: OMP_NUM_THREADS if the user set it for the "
        "executors, else the cores of a task, spark.task.cpus",
        check=at_least(1),
        more="These are the threads of torch, BLAS libraries, Arrow and tokenizers. The default is lower if the "
        "executor may use fewer cores, by its affinity or the quota of its container.",
    )
    parallelism: Entry[Any] = Entry(
        _to_parallelism,
        "how the model is divided among ranks: a sparkdl.parallel.Parallelism, a dict of its sizes, or auto for the "
        "layout that the planner chooses; default: each rank has a replica",
        field="parallelism",
        more="``shard`` divides weights, gradients and optimizer state of any model; ``tensor`` needs a plan and "
        "``context`` position numbers, see docs/parallelism.md. The product of the sizes is numWorkers. With "
        "``auto``, a step has the rows that replicas have, see docs/planner.md.",
    )
    setParallelism = parallelism.setter()
    balance, getBalance, setBalance = param(
        OneOf(*BALANCES),
        "how the rows of a step are divided among ranks: equal, or speed for rows in proportion to the measured speed "
        "of each rank",
        default="equal",
        field="balance",
        more="With ``speed``, a fit does not repeat to the bit, and faster ranks need memory for more rows. The "
        "history has the rows of each rank as ``rank_rows``. See docs/elastic.md.",
    )
    stragglerFactor, getStragglerFactor, setStragglerFactor = optional(
        TypeConverters.toFloat,
        "how many times the median time per row of the other ranks a rank has to take to be named in a warning (> 1); "
        "default: ranks are not watched",
        check=at_least(1.01),
        field="straggler_factor",
        more="The ranks exchange their times every two seconds. MLflow gets the metric "
        "``system/stragglers/rank_<number>``.",
    )
    stragglerSeconds, getStragglerSeconds, setStragglerSeconds = param(
        TypeConverters.toFloat,
        "for how many seconds a rank has to be slower than stragglerFactor says",
        default=30.0,
        check=at_least(0),
        field="straggler_seconds",
    )
    replaceStragglers, getReplaceStragglers, setReplaceStragglers = param(
        TypeConverters.toBoolean,
        "whether a rank that stragglerFactor names leaves an elastic fit after a step, and another one takes its place",
        default=False,
        field="replaces_stragglers",
    )
    transport, getTransport, setTransport = param(
        OneOf(*TRANSPORTS),
        "transport of the gradients between ranks: auto, native, shm, tcp, mpi, hierarchical or hierarchical-mpi",
        default="auto",
        more="``hierarchical`` and ``hierarchical-mpi`` are for several hosts with GPUs: they use NCCL within a "
        "host, and TCP or MPI between hosts.",
    )
    wire, getWire, setWire = param(
        OneOf(*WIRES),
        "dtype in which sums of float32, such as those of gradients, are sent between hosts: float32, or bfloat16 or "
        "float16 for rounded values",
        default="float32",
        more="Rounding halves the number of bytes. Sums are still computed in float32; the largest float16 is 65504. "
        "Nothing is rounded within a host. MPI sends only float32. So does NCCL, which sends the gradients on GPUs "
        'unless ``transport="hierarchical"``; ranks then warn that ``wire`` has no effect.',
    )

    synchronization: Entry[Any] = Entry(
        partial(_to_settings, kinds=SYNCHRONIZATIONS, example="{'kind': 'DiLoCo', 'every': 32}"),
        "how often ranks synchronize weights that each updates by itself: a LocalSGD or DiLoCo of sparkdl.torch, or a "
        "dict; default: they average gradients in each step",
        field="synchronization",
        more="For slow links between hosts, see docs/slow_links.md.",
    )
    setSynchronization = synchronization.setter()
    compression: Entry[Any] = Entry(
        partial(_to_settings, kinds=COMPRESSIONS, example="{'kind': 'PowerSGD', 'rank': 4}"),
        "how ranks compress the gradients that they send: a PowerSGD or TopK of sparkdl.torch, or a dict; default: not "
        "at all",
        field="compression",
        more="For slow links between hosts, on CPU ranks, see docs/slow_links.md.",
    )
    setCompression = compression.setter()

    def getParallelism(self) -> Parallelism | Literal["auto"] | None:
        """Return how the model is divided among ranks; None for a replica on each rank."""
        if not self.isSet(self.parallelism):
            return None
        value = self.getOrDefault(self.parallelism)
        return AUTO if value == AUTO else _parallelism(value)

    def getSynchronization(self) -> Synchronization | None:
        """Return how often ranks synchronize their weights; None if they average gradients in each step."""
        if not self.isSet(self.synchronization):
            return None
        made: Synchronization = settings_of(self.getOrDefault(self.synchronization), SYNCHRONIZATIONS)
        return made

    def getCompression(self) -> Compression | None:
        """Return how ranks compress gradients; None if they send them as they are."""
        if not self.isSet(self.compression):
            return None
        made: Compression = settings_of(self.getOrDefault(self.compression), COMPRESSIONS)
        return made


class HasRows(Params):
    """Params for where the training rows are stored, and how long."""

    cache, getCache, setCache = param(
        OneOf("off", "memory", "disk"),
        "where ranks keep decoded rows after the first epoch: memory or disk, or off to keep none",
        default="off",
        more="Each rank keeps up to 4 GiB of training rows and up to 1 GiB of validation rows.",
    )
    store: Entry[Any] = Entry(
        _to_url,
        "Store, path or URL for the training rows; default: $SPARKDL_STORE, else a cache folder on the driver's host",
        more="The driver and all executors need access to it.",
    )
    setStore = store.setter()
    keepRowsSeconds = Entry(
        TypeConverters.toFloat,
        "seconds that the training rows stay in the Store after their last use, for the next fit on the same DataFrame "
        "(>= 0); default: keep_for of the Store, or a day for a path or URL",
        check=at_least(0),
        more="With 0 they are removed after the fit.",
    )
    setKeepRowsSeconds = keepRowsSeconds.setter()

    def getStore(self) -> Store:
        """Return the Store."""
        store = Store(self.getOrDefault(self.store)) if self.isSet(self.store) else Store.default()
        if not self.isSet(self.keepRowsSeconds):
            return store
        return Store(store.url, keep_for=timedelta(seconds=self.getKeepRowsSeconds()))

    def getKeepRowsSeconds(self) -> float:
        """Return the seconds that the training rows stay in the Store after their last use."""
        if self.isSet(self.keepRowsSeconds):
            return self.getOrDefault(self.keepRowsSeconds)
        return KEEP_FOR.total_seconds()

    def _set(self: ParamsT, **params: Any) -> ParamsT:
        store = params.get("store")
        if isinstance(store, Store):  # the Param holds its URL alone
            params.setdefault("keepRowsSeconds", store.keep_for.total_seconds())
        return super()._set(**params)


class HasCheckpoints(Params):
    """Params for checkpoints, and for resuming a fit from them when ranks are lost."""

    checkpointDir, getCheckpointDir, setCheckpointDir = optional(
        _to_url,
        "path or URL of the folder of a fit's checkpoints; the fit resumes from the last one; default: no checkpoints",
        more="An interrupted fit resumes when it is run again with the same Params and rows, and ends with the same "
        "weights. A finished fit that is run again returns its model, or continues training if ``epochs`` is larger.",
    )
    checkpointEverySteps, getCheckpointEverySteps, setCheckpointEverySteps = optional(
        TypeConverters.toInt,
        "number of updates of the weights between two checkpoints (> 0); default: a checkpoint at the end of each "
        "epoch only",
        check=at_least(1),
    )
    keepCheckpoints, getKeepCheckpoints, setKeepCheckpoints = param(
        TypeConverters.toInt, "number of the newest checkpoints to keep (> 0)", default=2, check=at_least(1)
    )
    maxRestarts, getMaxRestarts, setMaxRestarts = param(
        TypeConverters.toInt,
        "maximum number of times that a fit restarts from its last checkpoint after ranks or a connection were lost "
        "(>= 0)",
        default=0,
        check=at_least(0),
        more="A rank is lost with its process, executor or host, or if it hangs. An exception that the code of a "
        "rank raises ends the fit at once. Without a ``checkpointDir``, the checkpoints are in the Store until the "
        "fit ends.",
    )
    minWorkers = Entry(
        TypeConverters.toInt,
        "minimum number of ranks, from 1 to numWorkers: of a restart if slots are missing, and of an elastic fit that "
        "has lost ranks; default: "
        "numWorkers, or the ranks of one replica of the model if the fit is elastic",
    )
    setMinWorkers = minWorkers.setter()
    elastic, getElastic, setElastic = param(
        TypeConverters.toBoolean,
        "whether the fit continues with the ranks that are left when others are lost, and takes in new ones",
        default=False,
        more="Ranks that are lost are started again, in each case as a Spark task of its own, and so also with dynamic "
        "allocation. Ranks that are left repeat the step in flight; new ones take over the state of another. "
        "``maxRestarts``, if it is set, limits how many are started again. See docs/elastic.md.",
    )
    maxWorkers = Entry(
        TypeConverters.toInt,
        "maximum number of ranks of an elastic fit, which takes in further ones where slots are free (>= numWorkers); "
        "default: numWorkers",
    )
    setMaxWorkers = maxWorkers.setter()
    communicationRetries, getCommunicationRetries, setCommunicationRetries = param(
        TypeConverters.toInt,
        "how often in succession the ranks of an elastic fit meet again and repeat a step whose communication has "
        "failed although no rank was lost (>= 0)",
        default=3,
        check=at_least(0),
    )
    hangTimeoutSeconds, getHangTimeoutSeconds, setHangTimeoutSeconds = optional(
        TypeConverters.toFloat,
        "seconds after which a rank that other ranks wait for, or that does not answer, is considered hanging (>= 2); "
        "default: 240",
        check=at_least(MIN_HANG_TIMEOUT_S),
        more="The fit then ends with an error that says where every rank was, or restarts as after the loss of a rank. "
        "If this Param is set, each rank also has to finish each step and each batch of validation within this time, "
        "even if no other rank waits for it.",
    )

    def getMinWorkers(self) -> int:
        """Return the minimum number of ranks of a restarted fit."""
        if self.isSet(self.minWorkers):
            return self.getOrDefault(self.minWorkers)
        return 1 if self.getElastic() else int(self.getOrDefault("numWorkers"))

    def getMaxWorkers(self) -> int:
        """Return the maximum number of ranks of an elastic fit."""
        if self.isSet(self.maxWorkers):
            return self.getOrDefault(self.maxWorkers)
        return int(self.getOrDefault("numWorkers"))


class HasTracking(Params):
    """Params for MLflow, and for the progress display on the driver."""

    tracking, getTracking, setTracking = param(
        OneOf("auto", "on", "off"),
        "MLflow tracking: auto (on if MLflow is installed), on or off",
        default="auto",
    )
    experiment, getExperiment, setExperiment = optional(
        TypeConverters.toString,
        "name of the MLflow experiment, for fits without an active run; default: the active experiment",
        check=_check_filled,
    )
    runName, getRunName, setRunName = optional(
        TypeConverters.toString,
        "name of the MLflow run, which is nested in a run that is active; default: a name that MLflow chooses",
    )
    trackingTimeoutSeconds, getTrackingTimeoutSeconds, setTrackingTimeoutSeconds = param(
        TypeConverters.toFloat,
        "seconds that a fit waits at its end until MLflow has received all data, plus one second for each MiB of model "
        "and checkpoints (>= 0)",
        default=30.0,
        check=at_least(0),
        more="Data that MLflow has not received by then is kept in the Store.",
    )
    registeredModelName, getRegisteredModelName, setRegisteredModelName = optional(
        TypeConverters.toString,
        "name under which MLflow registers a new version of the model; default: the model is not registered",
        more='In Unity Catalog, it has the form ``"catalog.schema.model"``. The model is logged in any case.',
    )
    registeredModelAlias, getRegisteredModelAlias, setRegisteredModelAlias = optional(
        TypeConverters.toString,
        "alias of the new version of the registered model; needs a registeredModelName",
    )
    logCheckpoints, getLogCheckpoints, setLogCheckpoints = param(
        TypeConverters.toBoolean,
        "whether the checkpoints that remain after a fit are copied into its MLflow run; needs a checkpointDir",
        default=False,
    )
    showProgress, getShowProgress, setShowProgress = param(
        TypeConverters.toBoolean,
        "whether fit shows its progress on stderr or in the notebook",
        default=True,
    )
    logFormat, getLogFormat, setLogFormat = param(
        OneOf("text", "json"),
        "format of the progress and of the lines of ranks: text, with a bar in terminals and notebooks, or json for an "
        "object per line on stderr",
        default="text",
    )
    monitor: Entry[Any] = Entry(
        _to_monitor,
        "how the ranks are watched while the fit runs: a sparkdl.monitor.Monitor or a dict of its settings; default: "
        "not at all",
        more="Speed, waiting and use of devices of each rank go to MLflow, to ``sparkdl top``, and where else the "
        "settings say. See docs/monitoring.md.",
    )
    setMonitor = monitor.setter()

    def getMonitor(self) -> Monitor | None:
        """Return how the ranks are watched; None if they are not."""
        if not self.isSet(self.monitor):
            return None
        kind: type[Monitor] = load_entry("Param monitor").Monitor
        return kind.from_dict(self.getOrDefault(self.monitor))
