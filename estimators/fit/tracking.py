"""Logs a fit to MLflow: the model with its signature, dataset, reports, plot, and Params.

The metrics are logged by :mod:`sparkdl.estimators.fit.progress`.
"""

from __future__ import annotations

import io
import json
import logging
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl import __version__
from sparkdl.data.files.filesystems import open_location
from sparkdl.errors import count_of, list_names
from sparkdl.estimators.fit.checkpoints import run_key_of
from sparkdl.estimators.fit.inputs import column_names
from sparkdl.estimators.scoring.columns import value_type
from sparkdl.model.architecture import count_parameters
from sparkdl.model.saved_model import modules_needed
from sparkdl.model.served_model import answer_names, default_params
from sparkdl.tracking import (
    FitRun,
    LoggedColumn,
    LoggedDataset,
    LoggedModelSpec,
    Registration,
    RunGroup,
    context_tags,
    is_tracking,
    without_credentials,
)
from sparkdl.tracking.mlflow_model import DATA_FOLDER, MODULE_FOLDER
from sparkdl.training.checkpoint.identity import dataset_digest
from sparkdl.training.history import SYSTEM
from sparkdl.training.spec import DRAWN

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from sparkdl.collective import WorldReport
    from sparkdl.data import Column, ParquetDataset
    from sparkdl.data.spark.input_files import InputFiles
    from sparkdl.estimators.fit.recipe import Recipe
    from sparkdl.estimators.params.estimator import _TorchEstimatorParams
    from sparkdl.estimators.summary import TrainingSummary
    from sparkdl.estimators.torch_model import TorchModel
    from sparkdl.model.signature import ModelOutput
    from sparkdl.training.history import EpochRecord

_logger = logging.getLogger(__name__)


def save_for_mlflow(
    model: TorchModel, folder: str | os.PathLike[str], example: Mapping[str, Any] | None = None
) -> LoggedModelSpec:
    """Save a model below a local folder, and return its description for MLflow.

    Args:
        model: the model.
        folder: existing local folder.
        example: rows, columns of shape ``(rows, *shape)``, the first one without nulls as input example; None for no
            example. Without one the saved model holds no rows either.

    Raises:
        SerializationError: if a part of the model cannot be pickled.
    """
    there = Path(folder) / DATA_FOLDER
    (model if example is not None else model._without_examples()).write().save(str(there))
    signature, record = model.saved.signature, model.summary.model_record
    columns, outputs = signature.inputs.columns, signature.outputs
    return LoggedModelSpec(
        folder=there,
        inputs=tuple(_input(column) for column in columns),
        outputs=tuple(
            column
            for output, names in zip(outputs, answer_names(outputs), strict=True)
            for column in _answers(output, *names)
        ),
        example=_example(example, columns),
        params=default_params(signature),
        modules=frozenset(
            {
                *modules_needed(there / MODULE_FOLDER),
                *getattr(signature.inputs.prepare, "imported_when_called", ()),
            }
        ),
        classes={output.name: output.classes for output in outputs if output.classes is not None},
        epoch=0 if record is None else record.epoch,
        metrics={} if record is None else record.values,
    )


def _try_example(example: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any] | None:
    try:
        return example()
    except Exception as error:
        _logger.warning("The model is logged without an input example: %s: %s", type(error).__name__, error)
        return None


def _example(example: Mapping[str, Any] | None, columns: Sequence[Column]) -> dict[str, Any] | None:
    """Return the first row without nulls; None if there is none, or rows lack columns, as those of packed texts do."""
    if example is None or any(column.name not in example for column in columns):
        return None
    for index in range(len(example[columns[0].name])):
        row = {column.name: example[column.name][index] for column in columns}
        values = [row[column.name] for column in columns if column.takes_nulls]
        # NaN and NaT differ from themselves.
        if not any(value is None or np.any(np.asarray(value) != value) for value in values):
            return {column.name: _with_zone(row[column.name], column) for column in columns}
    return None


def _with_zone(value: Any, column: Column) -> Any:
    """Return a value of the example; instants as microseconds, which have no time zone to be mistaken."""
    if not column.is_utc:
        return value
    if isinstance(value, list):
        return [_with_zone(item, column) for item in value]
    return value.astype(np.int64)


def _input(column: Column) -> LoggedColumn:
    if column.kind == "ragged":
        kind, dtype = column.element
        return LoggedColumn(name=column.name, kind=_kind(kind, dtype), depth=len(column.lengths))
    return LoggedColumn(name=column.name, kind=_kind(column.kind, column.dtype), depth=len(column.shape))


def _answers(output: ModelOutput, prediction: str, probability: str | None) -> list[LoggedColumn]:
    kind = {"text": "string", "tokens": "long"}.get(output.kind, value_type(output))
    is_array = bool(output.shape) or output.kind == "tokens"
    columns = [LoggedColumn(name=prediction, kind=kind, depth=int(is_array))]
    if probability is not None:
        columns.append(LoggedColumn(name=probability, kind="double", depth=1))
    return columns


def _kind(kind: str, dtype: str) -> str:
    if kind == "number":
        # The widest type of each kind: MLflow refuses a list of Python floats where the signature says float32.
        return {"b": "boolean", "i": "long", "u": "long"}.get(np.dtype(dtype).kind, "double")
    return kind if kind in ("string", "binary", "timestamp") else "any"


@dataclass(frozen=True)
class NestedRun:
    """The MLflow run of one of several Param maps.

    Attributes:
        group: the run under which the runs of all maps are nested.
        index: index of the Param map.
    """

    group: RunGroup
    index: int


def group_of_fits(params: _TorchEstimatorParams, name: str) -> RunGroup | None:
    """Return the run under which the runs of several fits are nested; None if fits are not tracked.

    It is the active run of MLflow on this thread, or a new run with this name.
    """
    if not is_tracking(params.getTracking()):
        return None
    return RunGroup(params.getStore(), experiment=params.getExperiment(), name=name)


def run_of_fit(
    params: _TorchEstimatorParams, recipe: Recipe, nested: NestedRun | None, dataset: ParquetDataset
) -> AbstractContextManager[FitRun | None]:
    """Return the MLflow run of a fit according to its Params, with a description; a context of None without tracking.

    A fit that was interrupted and continues from checkpoints continues its run.

    Args:
        params: Params of the fit.
        recipe: what the fit trains.
        nested: place among the runs of several Param maps; None for a fit that is not one of several.
        dataset: rows of the fit.
    """
    if not is_tracking(params.getTracking()):
        return nullcontext()
    checkpoints = params.getCheckpointDir()
    return FitRun(
        params.getStore(),
        experiment=params.getExperiment(),
        run_name=params.getRunName(),
        tags={
            "mlflow.note.content": _description(params, recipe.model, dataset),
            "sparkdl.estimator": type(params._caller).__name__,
            "sparkdl.version": __version__,
            **({} if nested is None else {"sparkdl.param_map": str(nested.index)}),
        },
        group=None if nested is None else nested.group,
        wait_s=params.getTrackingTimeoutSeconds(),
        # A run of its own has a name, and a trial of a search has onEpoch: the first trial is nested as the others are.
        may_join=params.getRunName() is None and params.getOnEpoch() is None,
        key=None if checkpoints is None else run_key_of(checkpoints),
    )


def _description(params: _TorchEstimatorParams, network: nn.Module, dataset: ParquetDataset) -> str:
    """Return the description of a run, in Markdown."""
    name, ranks = type(params._caller).__name__, params.getNumWorkers()
    number = sum(parameter.numel() for parameter in network.parameters())
    labels = ", ".join(f"`{name}`" for name in params._label_names())
    features = [f"`{name}`" for name in params.getFeaturesCols()]
    return (
        f"**{name}** of sparkdl trains `{type(network).__name__}` with {number:,} parameters on "
        f"{count_of(dataset.num_rows, 'row')}, by {count_of(ranks, 'rank')}"
        f"{f', to predict {labels} from {list_names(features)}' if labels else ''}.\n\n"
        "Metrics under `system/` are about the course of the fit: times, rates, communication and load. "
        "`reports/history.json` has all epochs, `reports/communication.txt` what the ranks exchanged."
    )


def describe_dataset(
    params: _TorchEstimatorParams, dataset: ParquetDataset, source: InputFiles | None, table: str | None
) -> LoggedDataset:
    """Return the description of the rows for MLflow: their source, hash, columns and number.

    Args:
        params: Params of the fit.
        dataset: rows of the fit.
        source: files that the DataFrame reads; None if it reads none, or the driver cannot see them.
        table: name of the table or view that the DataFrame reads; None if it reads none or several.
    """
    names = column_names(params)
    columns = [dataset.column(name) for name in names]
    schema = [{**_schema_of(_input(column)), "name": column.name, "required": True} for column in columns]
    return LoggedDataset(
        name=table or ("DataFrame" if source is None else source.folder.rstrip("/").rpartition("/")[2]),
        digest=dataset_digest(dataset, names),
        **_source_of(source, table),
        schema=json.dumps({"mlflow_colspec": schema}),
        profile=json.dumps({"num_rows": dataset.num_rows, "num_row_groups": len(dataset.row_groups)}),
    )


def _source_of(source: InputFiles | None, table: str | None) -> dict[str, str]:
    """Return the source of the rows in MLflow's format: Spark's table or files, or the program that made the rows."""
    if table is not None:
        return {"source_type": "spark", "source": json.dumps({"table_name": table})}
    if source is not None:
        files = {"path": source.folder, "num_files": len(source.paths), "is_delta": source.is_delta}
        return {"source_type": "spark", "source": json.dumps(files)}
    return {"source_type": "code", "source": json.dumps({"tags": context_tags()})}


def log_values(run: FitRun, summary: TrainingSummary, *, is_best: bool) -> None:
    """Log the number of the model's epoch, and if it is the best one, its loss and metrics as ``best_<name>``."""
    record = summary.model_record
    if record is not None:
        best = {f"best_{name}": value for name, value in record.values.items()} if is_best else {}
        run.log_metrics(record.epoch, {"model_epoch": record.epoch, **best})


def log_reports(
    run: FitRun,
    history: Sequence[EpochRecord],
    communication: WorldReport | None,
    worlds: Sequence[Mapping[str, float]],
) -> None:
    """Log reports on communication, worlds and history; ``communication`` is None if the fit did not train."""
    if worlds:
        run.log_file("reports/worlds.json", _as_json(worlds))
    if communication is not None:
        counts = communication.reports[0].as_metrics()
        run.log_metrics(len(history), {f"{SYSTEM}{name}": value for name, value in counts.items()})
        run.log_file("reports/communication.txt", f"{communication}\n".encode())
        run.log_file("reports/communication.json", _as_json(communication.as_dict()))
    run.log_file("reports/history.json", _as_json([asdict(record) for record in history]))


def log_picture(run: FitRun, model: TorchModel) -> None:
    """Log ``summary.plot()``; do nothing without matplotlib, which is an extra."""
    try:
        figure = model.summary.plot()
    except ImportError as error:
        _logger.info("The MLflow run has no picture of the fit: %s", error)
        return
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    run.log_file("plots/fit.png", picture.getvalue())


def log_outcome(
    run: FitRun | None,
    params: _TorchEstimatorParams,
    model: TorchModel,
    communication: WorldReport | None,
    *,
    worlds: Sequence[Mapping[str, float]],
    example: Callable[[], Mapping[str, Any]],
    folder: Path,
    checkpoints: str | None,
) -> None:
    """Log the results of a fit, and wait until they are sent; an error is logged as a warning.

    Args:
        run: MLflow run of the fit; None if the fit is not tracked.
        params: Params of the fit.
        model: model of the fit.
        communication: communication report of the ranks; None if the fit did not train.
        worlds: the worlds that the ranks of an elastic fit have formed; none for any other fit.
        example: function that returns rows, columns of shape ``(rows, *shape)``, the first one without nulls as input
            example.
        folder: local folder that exists until the run is closed.
        checkpoints: URL of the checkpoints; None for no checkpointDir.
    """
    if run is None:
        return
    try:
        log_values(run, model.summary, is_best=params.getBestMetric() is not None)
        log_reports(run, model.history, communication, worlds)
        log_picture(run, model)
        if params.getLogCheckpoints() and checkpoints is not None:
            run.log_folder("checkpoints", _fetch(checkpoints, folder / "checkpoints"))
        name, alias = params.getRegisteredModelName(), params.getRegisteredModelAlias()
        registration = None if name is None else Registration(name=name, alias=alias)
        rows = _try_example(example) if run.switches.log_input_examples else None
        run.log_model(save_for_mlflow(model, folder, rows), folder, registration)
        run.flush()
    except Exception as error:
        _logger.log(
            logging.DEBUG if run.switches.silent else logging.WARNING,
            "The model is trained, but it could not be described to MLflow: %s: %s. To log it: "
            "sparkdl.mlflow.log_model(model).",
            type(error).__name__,
            without_credentials(str(error)),
        )


def _fetch(url: str, folder: Path) -> Path:
    """Return a local copy of a folder, because the next fit may empty the folder before everything is sent."""
    open_location(url).fetch_folder(folder)
    return folder


def _as_json(content: Any) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"


def _schema_of(column: LoggedColumn) -> dict[str, Any]:
    """Return a column's type as MLflow's JSON of a schema has it."""
    schema: dict[str, Any] = {"type": "any" if column.kind == "timestamp" else column.kind}
    for _ in range(column.depth):
        schema = {"type": "array", "items": schema}
    return schema


def params_to_log(
    params: _TorchEstimatorParams, recipe: Recipe, parquet: ParquetDataset
) -> dict[str, object]:
    """Return the Params by name, with objects replaced by their names, and the numbers of parameters and rows.

    Those that the user has set, or that are learned from the rows, come first, and those with their defaults last.
    """
    objects = params._object_params()
    of_caller = {param.name: value for param, value in params._caller.extractParamMap().items()}
    plain = {param.name: value for param, value in params.extractParamMap().items() if param not in objects}
    if "initialWeights" in plain:  # not the copy of a folder in the Store, which exists only during the fit
        plain["initialWeights"] = params._path_of_initial_weights() or DRAWN
    if isinstance(params.getParallelism(), str):
        del plain["parallelism"]  # the ranks tell which one was chosen
    names = {
        **{name: _name_of(value) for name, value in recipe.by_param().items()},
        **{param.name: _name_of(params.getOrDefault(param)) for param in objects},
        "metrics": ", ".join(recipe.metrics),
    }
    num_parameters, num_trained = count_parameters(recipe.model)
    values = {
        **plain,
        **{name: value for name, value in of_caller.items() if not params.hasParam(name)},
        **{name: value for name, value in names.items() if value},
        "model": type(recipe.model).__name__,
        "numParameters": num_parameters,
        "numTrainedParameters": num_trained,
        "numRows": parquet.num_rows,
    }
    are_defaults = {
        param.name
        for owner in (params, params._caller)
        for param in owner.params
        if not owner.isSet(param) and (owner is params or not params.hasParam(param.name))
    } - names.keys()
    return dict(sorted(values.items(), key=lambda item: item[0] in are_defaults))


def _name_of(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_name_of, value))
    if isinstance(value, str):
        return value
    named = value.func if isinstance(value, partial) else value
    return str(getattr(named, "__name__", type(named).__name__))
