"""Entries of the table of Params for where and how a fit runs: ranks, rows, checkpoints, restarts, and MLflow."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import timedelta
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param, Params, TypeConverters

from sparkdl.collective import TRANSPORTS, WIRES
from sparkdl.data import Store
from sparkdl.data.store.store import KEEP_FOR
from sparkdl.errors import ParamError, did_you_mean
from sparkdl.estimators.params.base import ParamsT, one_of
from sparkdl.estimators.params.table import Entry, among, at_least, optional, param
from sparkdl.launch.hangs.watch import MIN_HANG_TIMEOUT_S

if TYPE_CHECKING:
    from sparkdl.parallel import Parallelism


def _to_url(value: Any) -> str:
    return str(value) if isinstance(value, PurePath) else TypeConverters.toString(value)


def _to_store_url(value: Any) -> str:
    if isinstance(value, os.PathLike):
        return TypeConverters.toString(os.fspath(value))
    return value.url if isinstance(value, Store) else TypeConverters.toString(value)


def _to_parallelism(value: Any) -> dict[str, Any]:
    given = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    if not isinstance(given, Mapping):
        raise TypeError(
            f"it takes a sparkdl.parallel.Parallelism, or a dict such as {{'shard': 4}}, not a {type(value).__name__}"
        )
    made, plain = _parallelism(given), _parallelism({})
    return {name: each for name, each in asdict(made).items() if each != getattr(plain, name)}


def _parallelism(given: Mapping[str, Any]) -> Parallelism:
    from sparkdl.parallel import Parallelism  # with torch's device meshes, which few fits need

    unknown = [name for name in given if name not in Parallelism.__dataclass_fields__]
    if unknown:
        known = list(Parallelism.__dataclass_fields__)
        hint = did_you_mean(unknown[0], known, otherwise=f"It takes {', '.join(known)}.", show=repr)
        raise ParamError(f"Param parallelism has no size {unknown[0]!r}. {hint}")
    return Parallelism(**given)


def _check_parallelism(param: Param[Any], value: Mapping[str, Any]) -> None:
    del param
    _parallelism(value)


class HasRanks(Params):
    """Params for the ranks of a fit and how they communicate."""

    numWorkers, getNumWorkers, setNumWorkers = param(
        TypeConverters.toInt,
        "ranks that train together, one slot of the cluster each",
        default=1,
        check=at_least(1),
    )
    gpusPerWorker, getGpusPerWorker, setGpusPerWorker = param(
        TypeConverters.toInt,
        "GPUs of each rank: 0 trains on CPU, 1 on a GPU",
        default=0,
        check=among(0, 1),
    )
    parallelism = Entry(
        _to_parallelism,
        "how ranks share the model: a sparkdl.parallel.Parallelism or a dict of its sizes; default: each has a replica",
        check=_check_parallelism,
        field="parallelism",
        more="``shard`` divides weights, gradients and optimizer state of any model; ``tensor`` needs a plan and "
        "``context`` numbers of positions, see docs/parallelism.md. The product of the sizes is numWorkers.",
    )
    transport, getTransport, setTransport = param(
        one_of(*TRANSPORTS),
        "how ranks exchange gradients: auto, native, shm, tcp, mpi, hierarchical or hierarchical-mpi",
        default="auto",
        more="The last two are for several hosts with GPUs: NCCL inside a host, and TCP or MPI across.",
    )
    wire, getWire, setWire = param(
        one_of(*WIRES),
        "dtype in which sums of float32, the gradients, travel between hosts: float32, or rounded to bfloat16 or "
        "float16",
        default="float32",
        more="Rounding takes half the bytes; sums are still computed in float32, and float16 ends at 65504. Nothing is "
        "rounded inside a host. MPI sends float32 alone, and so does NCCL, by which gradients on GPUs travel unless "
        '``transport="hierarchical"``: ranks warn of it.',
    )

    def getParallelism(self) -> Parallelism | None:
        """Return how the model is divided among ranks; None for a replica on each rank."""
        if not self.isSet(self.parallelism):
            return None
        given: dict[str, Any] = self.getOrDefault(self.parallelism)
        return _parallelism(given)

    def setParallelism(self: ParamsT, value: Parallelism | Mapping[str, Any] | None) -> ParamsT:
        """Set how the model is divided among ranks."""
        return self._set(parallelism=value)


class HasRows(Params):
    """Params for where the training rows are stored, and how long."""

    cache, getCache, setCache = param(
        one_of("off", "memory", "disk"),
        "whether ranks keep decoded rows after the first epoch: off, memory or disk",
        default="off",
        more="Up to 4 GiB of each rank's training rows are kept, and 1 GiB of rows to validate on.",
    )
    store = Entry(
        _to_store_url,
        "Store, path or URL for the training rows; default: $SPARKDL_STORE, else a cache folder on this machine",
        more="Driver and executors have to reach it.",
    )
    keepRowsSeconds = Entry(
        TypeConverters.toFloat,
        "how long the training rows stay in the Store after their last use, for the next fit on the same DataFrame "
        "(>= 0); default: as the Store says, else a day",
        check=at_least(0),
        more="0 removes them after the fit.",
    )

    def getStore(self) -> Store:
        """Return the Store."""
        store = Store(self.getOrDefault(self.store)) if self.isSet(self.store) else Store.default()
        if not self.isSet(self.keepRowsSeconds):
            return store
        return Store(store.url, keep_for=timedelta(seconds=self.getKeepRowsSeconds()))

    def setStore(self: ParamsT, value: Store | str | None) -> ParamsT:
        """Set the Store, as an object, path or URL."""
        return self._set(store=value)

    def getKeepRowsSeconds(self) -> float:
        """Return the seconds that the training rows stay in the Store after their last use."""
        if self.isSet(self.keepRowsSeconds):
            return self.getOrDefault(self.keepRowsSeconds)
        return KEEP_FOR.total_seconds()

    def setKeepRowsSeconds(self: ParamsT, value: float | None) -> ParamsT:
        """Set how long the training rows stay in the Store after their last use."""
        return self._set(keepRowsSeconds=value)

    def _set(self: ParamsT, **params: Any) -> ParamsT:
        store = params.get("store")
        if isinstance(store, Store):  # the Param holds its URL alone
            params.setdefault("keepRowsSeconds", store.keep_for.total_seconds())
        return super()._set(**params)


class HasCheckpoints(Params):
    """Params for checkpoints, and for resuming a fit from them when ranks are lost."""

    checkpointDir, getCheckpointDir, setCheckpointDir = optional(
        _to_url,
        "path or URL where a fit keeps checkpoints and resumes from the last one; default: none are taken",
        more="An interrupted fit resumes when it is run again with the same Params and rows, and ends with the same "
        "weights; one that has finished returns its model, or trains on where ``epochs`` is larger.",
    )
    checkpointEverySteps, getCheckpointEverySteps, setCheckpointEverySteps = optional(
        TypeConverters.toInt,
        "updates of the weights from one checkpoint to the next (> 0); default: one at the end of each epoch alone",
        check=at_least(1),
    )
    keepCheckpoints, getKeepCheckpoints, setKeepCheckpoints = param(
        TypeConverters.toInt, "how many of the last checkpoints stay (> 0)", default=2, check=at_least(1)
    )
    maxRestarts, getMaxRestarts, setMaxRestarts = param(
        TypeConverters.toInt,
        "how often a fit restarts by itself from its last checkpoint when ranks were lost (>= 0)",
        default=0,
        check=at_least(0),
        more="A process, an executor or a host may be lost, or a rank hang. An exception that code raises ends the fit "
        "at once. Without a ``checkpointDir`` the checkpoints lie in the Store meanwhile.",
    )
    minWorkers = Entry(
        TypeConverters.toInt,
        "fewest ranks with which a fit restarts where slots are gone, from 1 to numWorkers; default: numWorkers",
    )
    hangTimeoutSeconds, getHangTimeoutSeconds, setHangTimeoutSeconds = optional(
        TypeConverters.toFloat,
        "seconds after which a rank that others wait for, or that does not answer, counts as hanging (>= 2); default: "
        "240",
        check=at_least(MIN_HANG_TIMEOUT_S),
        more="The fit then ends with an error that says where every rank was, or restarts as after a lost rank. Where "
        "it is set, a rank also has to finish a step, or a batch of validation, within that time, even if no other "
        "rank waits for it.",
    )

    def getMinWorkers(self) -> int:
        """Return the minimum number of ranks with which a fit restarts."""
        if self.isSet(self.minWorkers):
            return self.getOrDefault(self.minWorkers)
        return int(self.getOrDefault("numWorkers"))

    def setMinWorkers(self: ParamsT, value: int | None) -> ParamsT:
        """Set the minimum number of ranks with which a fit restarts."""
        return self._set(minWorkers=value)


class HasTracking(Params):
    """Params for MLflow, and for the progress display on the driver."""

    tracking, getTracking, setTracking = param(
        one_of("auto", "on", "off"), "MLflow: auto (on when it is installed), on or off", default="auto"
    )
    experiment, getExperiment, setExperiment = optional(
        TypeConverters.toString, "MLflow experiment; default: the active one"
    )
    runName, getRunName, setRunName = optional(
        TypeConverters.toString, "name of the MLflow run; default: MLflow makes one up"
    )
    trackingTimeoutSeconds, getTrackingTimeoutSeconds, setTrackingTimeoutSeconds = param(
        TypeConverters.toFloat,
        "how long a fit waits at its end for MLflow to take its data, and a second more for each MiB of the model "
        "(>= 0)",
        default=30.0,
        check=at_least(0),
        more="What is not taken by then is kept in the Store.",
    )
    registeredModelName, getRegisteredModelName, setRegisteredModelName = optional(
        TypeConverters.toString,
        "name under which MLflow registers a new version of the model; default: it is not registered",
        more='In Unity Catalog ``"catalog.schema.model"``. The model is logged in any case.',
    )
    registeredModelAlias, getRegisteredModelAlias, setRegisteredModelAlias = optional(
        TypeConverters.toString, "alias that the new version of the model gets; needs a registeredModelName"
    )
    logCheckpoints, getLogCheckpoints, setLogCheckpoints = param(
        TypeConverters.toBoolean,
        "whether the checkpoints that a fit leaves are copied into its MLflow run; needs a checkpointDir",
        default=False,
    )
    showProgress, getShowProgress, setShowProgress = param(
        TypeConverters.toBoolean,
        "whether fit shows its progress, on stderr or in the notebook",
        default=True,
    )
