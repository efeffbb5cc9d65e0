"""Writes a saved model as a model of MLflow, with the flavors ``python_function`` and ``sparkdl``.

The code that goes with every model is written by :mod:`~sparkdl.tracking.model_code`.

One folder serves both flavors: ``data/sparkdl_model`` of the MLflow model is a TorchModel as Spark ML saves it. The
pyfunc reads only its folder ``module``, and therefore needs no Spark.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl import __version__
from sparkdl.tracking.logged_model import (
    LoggedModelSpec,
    example_of,
    installed_version,
    pip_requirements,
    register,
    signature_of,
)
from sparkdl.tracking.model_code import LOADER_MODULE, write_code
from sparkdl.tracking.start import reporting_to

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.models import Model, ModelSignature
    from mlflow.models.model import ModelInfo

    from sparkdl.tracking.logged_model import LoggedDataset, Registration


FLAVOR_NAME = "sparkdl"
_NAME = "model"
"""Name of a logged model, unless the user gives another one."""
DATA_FOLDER = "sparkdl_model"
MODULE_FOLDER = "module"
MODEL_KEY_TAG = "sparkdl.model_key"


@dataclass(frozen=True, kw_only=True)
class FlavorOptions:
    """Options of an MLflow model, as the flavors of MLflow take them.

    Attributes:
        signature: signature of the model; None for the one that the saved model describes.
        input_example: input example; None for the one that the saved model describes.
        has_signature: whether the model gets a signature.
        has_input_example: whether the model gets an input example.
        pip_requirements: pip requirements of the model; None for the packages that it needs, in the versions that are
            installed here.
        extra_pip_requirements: further pip requirements.
        code_paths: local files and folders of modules that the model needs besides those of sparkdl, which it always
            carries.
        metadata: metadata for the MLmodel file.
    """

    signature: ModelSignature | None = None
    input_example: Any = None
    has_signature: bool = True
    has_input_example: bool = True
    pip_requirements: Sequence[str] | None = None
    extra_pip_requirements: Sequence[str] = ()
    code_paths: Sequence[str] | None = None
    metadata: Mapping[str, Any] | None = None


def save_flavor(
    spec: LoggedModelSpec,
    path: str | os.PathLike[str],
    options: FlavorOptions,
    mlflow_model: Model | None = None,
) -> None:
    """Write a model as an MLflow model into a new local folder.

    Raises:
        mlflow.exceptions.MlflowException: if the folder is not empty, or an option cannot be used.
    """
    import mlflow
    from mlflow.models import Model

    assert Path(spec.folder).name == DATA_FOLDER, "the flavor's configuration says where the model lies"
    model = Model() if mlflow_model is None else mlflow_model
    model.add_flavor(
        FLAVOR_NAME,
        data=f"data/{DATA_FOLDER}",
        sparkdl_version=__version__,
        torch_version=installed_version("torch"),
    )
    requirements = (
        pip_requirements(spec.modules) if options.pip_requirements is None else options.pip_requirements
    )
    signature = signature_of(spec) if options.signature is None else options.signature
    # In a prediction the probabilities are only a list of numbers.
    classes = {name: list(values) for name, values in spec.classes.items()}
    example = example_of(spec) if options.input_example is None else options.input_example
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder, warnings.catch_warnings():
        # MLflow's warning doubts the signature, which is the model's own and needs no example.
        warnings.filterwarnings("ignore", ".*An input example was not provided")
        mlflow.pyfunc.save_model(
            path=os.fspath(path),
            loader_module=LOADER_MODULE,
            data_path=os.fspath(spec.folder),
            mlflow_model=model,
            signature=signature if options.has_signature else None,
            input_example=example if options.has_input_example else None,
            pip_requirements=[*requirements, *options.extra_pip_requirements],
            code_paths=[*(options.code_paths or ()), *write_code(Path(folder))],
            model_config={"output": ""},  # which mlflow.models.evaluate can set, and no params
            metadata={**({"classes": classes} if classes else {}), **(options.metadata or {})} or None,
        )


def log_flavor(
    spec: LoggedModelSpec,
    options: FlavorOptions,
    *,
    name: str = _NAME,
    run_id: str | None = None,
    registration: Registration | None = None,
) -> ModelInfo:
    """Log a model to the MLflow server of the process, and return MLflow's description of it.

    The model is logged in the run with ``run_id``, or in the active run if that is None.

    Raises:
        mlflow.exceptions.MlflowException: if the server refuses the model.
    """
    import mlflow

    client = mlflow.MlflowClient()
    active = mlflow.active_run()
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as temporary:
        folder = Path(temporary, _NAME)
        save_flavor(spec, folder, options)
        if is_mlflow_2():
            info = _log(folder, name, run_id)
        else:
            run_id = run_id or (None if active is None else active.info.run_id)
            uri = _log_folder(client, folder, name=name, run_id=run_id, values=values_of(spec))
            info = mlflow.models.get_model_info(uri)
    if registration is not None:
        # In a run of MLflow 2, models of one name have one URI.
        identity = f"{info.model_uri}#{info.model_uuid}" if is_mlflow_2() else None
        info.registered_model_version = register(client, info.model_uri, registration, identity=identity)
    return info


def values_of(spec: LoggedModelSpec, dataset: LoggedDataset | None = None) -> dict[str, Any]:
    """Return what MLflow 3 shows on the page of a logged model, as JSON can hold it.

    It has the number of the ``epoch`` that the weights are from, its finite ``metrics`` by name, and name and digest of
    the training ``dataset``, or None.
    """
    return {
        "epoch": spec.epoch,
        "metrics": {name: float(value) for name, value in spec.metrics.items() if math.isfinite(value)},
        "dataset": None if dataset is None else [dataset.name, dataset.digest],
    }


def log_saved_flavor(
    client: MlflowClient, folder: Path, *, run_id: str, key: str, values: Mapping[str, Any] | None = None
) -> str:
    """Log a model that :func:`save_flavor` has written as ``model``, unless it is logged already; return its URI.

    Args:
        client: client of the MLflow server.
        folder: local folder of the MLflow model.
        run_id: id of the run.
        key: key of the logged model, to find the model if the server logged it and the response was lost.
        values: what :func:`values_of` returned; None if it is not known.

    Raises:
        mlflow.exceptions.MlflowException: if the server refuses the model.
    """
    if is_mlflow_2():  # which writes into the same folder of the run again
        with reporting_to(client.tracking_uri):  # Model.log takes no client
            return str(_log(folder, _NAME, run_id).model_uri)
    return _log_folder(client, folder, name=_NAME, run_id=run_id, values=values, key=key)


def _log_folder(
    client: MlflowClient,
    folder: Path,
    *,
    name: str,
    run_id: str | None,
    values: Mapping[str, Any] | None,
    key: str | None = None,
) -> str:
    """Log a saved MLflow model to a server of MLflow 3, and return its URI.

    ``Model.log`` of MLflow does not take a client, and shows on the model's page whatever its run has logged at the
    step 0, such as how busy hosts are.
    """
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model
    from mlflow.tracking.fluent import _get_experiment_id

    run = None if run_id is None else client.get_run(run_id)
    experiment = str(_get_experiment_id()) if run is None else run.info.experiment_id
    model: Any = None
    if key is not None:
        models = client.search_logged_models([experiment], f"tags.`{MODEL_KEY_TAG}` = '{key}'")
        model = min(models, key=lambda found: str(found.status) != "READY", default=None)  # a complete one
    if model is None:
        model = client.create_logged_model(
            experiment,
            name=name,
            source_run_id=run_id,
            params={} if run is None else dict(run.data.params),
            tags={} if key is None else {MODEL_KEY_TAG: key},
        )
    if str(model.status) == "READY":
        return str(model.model_uri)
    saved = Model.load(str(folder))
    saved.run_id, saved.model_id, saved.model_uuid = run_id, model.model_id, model.model_id
    saved.artifact_path = model.artifact_location
    saved.save(str(folder / "MLmodel"))
    client.log_model_artifacts(model.model_id, str(folder))
    if run_id is not None:
        client.log_outputs(
            run_id, [LoggedModelOutput(model.model_id, step=values["epoch"] if values is not None else 0)]
        )
        if values is not None:
            _log_values(client, run_id, model.model_id, values)
    client.finalize_logged_model(model.model_id, "READY")
    return str(model.model_uri)


def _log_values(client: MlflowClient, run_id: str, model_id: str, values: Mapping[str, Any]) -> None:
    """Log metrics of a model; those that its run has are logged with their times, so that the run has them once."""
    from mlflow.entities import Metric

    name, digest = values["dataset"] or (None, None)
    metrics = []
    for key, value in values["metrics"].items():
        history = client.get_metric_history(run_id, key)
        times = [
            metric.timestamp for metric in history if (metric.step, metric.value) == (values["epoch"], value)
        ]
        metrics.append(
            Metric(
                key,
                value,
                times[-1] if times else int(time.time() * 1000),
                values["epoch"],
                model_id=model_id,
                dataset_name=name,
                dataset_digest=digest,
                run_id=run_id,
            )
        )
    client.log_batch(run_id, metrics=metrics)


def _log(folder: Path, name: str, run_id: str | None) -> ModelInfo:
    """Log a saved MLflow model by ``Model.log`` of MLflow 2."""
    from mlflow.models import Model

    with _keep_module_path():
        info: ModelInfo = Model.log(artifact_path=name, flavor=_SavedFlavor, run_id=run_id, folder=folder)
    return info


@contextmanager
def _keep_module_path() -> Iterator[None]:
    """Remove new entries of ``sys.path`` that no longer exist: MLflow adds a temporary folder to try a model in it."""
    before = set(sys.path)
    try:
        yield
    finally:
        sys.path[:] = [entry for entry in sys.path if entry in before or Path(entry).exists()]


def is_mlflow_2() -> bool:
    """Return whether MLflow is of version 2, in which a logged model is only a folder of a run."""
    import mlflow

    return int(mlflow.__version__.split(".", maxsplit=1)[0]) < 3


class _SavedFlavor:
    """The flavor that ``Model.log`` of MLflow 2 calls, a class in place of a module; it copies a written model."""

    @staticmethod
    def save_model(path: str, mlflow_model: Model, folder: Path) -> None:
        from mlflow.models import Model

        shutil.copytree(folder, path, dirs_exist_ok=True)
        saved = Model.load(str(folder))
        mlflow_model.flavors = saved.flavors
        mlflow_model.signature = saved.signature
        if saved.saved_input_example_info is not None:
            mlflow_model.saved_input_example_info = saved.saved_input_example_info
        mlflow_model.metadata = saved.metadata or {}
        mlflow_model.model_size_bytes = saved.model_size_bytes
        mlflow_model.save(str(Path(path, "MLmodel")))


_SavedFlavor.__name__ = FLAVOR_NAME  # the name that MLflow uses for the flavor
