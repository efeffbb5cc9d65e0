"""Loads, saves and logs models with the flavor, sends kept runs, and sets what fits log.

All functions run on the *driver*; :func:`load_module` also runs where there is no Spark. :func:`send_kept` sends the
runs that fits have kept because MLflow did not accept them. :func:`autolog` configures the automatic logging of fits,
as ``autolog`` of MLflow's own flavors does.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.data.files.filesystems import absolute_url, open_location
from sparkdl.errors import ParamError, ParamTypeError, SavedModelError
from sparkdl.foreign_errors import how_to_install, reading_from
from sparkdl.tracking import Registration, SentRun, send_kept_runs
from sparkdl.tracking.logged_model import check_registration
from sparkdl.tracking.mlflow_model import FLAVOR_NAME, MODULE_FOLDER, FlavorOptions, log_flavor, save_flavor
from sparkdl.tracking.start import autologged
from sparkdl.tracking.torch_model import MLFLOW_SCHEMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from mlflow.models import Model, ModelSignature
    from mlflow.models.model import ModelInfo

    from sparkdl.data import Store
    from sparkdl.estimators import TorchModel
    from sparkdl.tracking import LoggedModelSpec


_SCHEMES = (*MLFLOW_SCHEMES, "dbfs:", "http:", "https:")
"""Beginnings of the URIs that MLflow resolves."""


def load_model(model_uri: str, dst_path: str | os.PathLike[str] | None = None) -> TorchModel:
    """Load a model as a Spark ML transformer; its ``summary.model_uri`` is the URI.

    Args:
        model_uri: MLflow's URI of the model: ``models:/m-1234``, ``models:/name@alias``, ``runs:/<id>/model``; or the
            path or URL of its folder.
        dst_path: existing local folder to download to, unless the model is in a local folder; None for a temporary one.

    Raises:
        ImportError: if pyspark is not installed.
        SavedModelError: if the model is not of this flavor, is damaged, or was saved by a newer version.
        mlflow.exceptions.MlflowException: if MLflow does not find the model.
    """
    folder, run_id = _download(model_uri, dst_path)
    try:
        import pyspark  # noqa: F401 - imported here, where the error message can name alternatives
    except ImportError as error:
        raise ImportError(
            "sparkdl.mlflow.load_model returns a model of Spark ML and needs pyspark, which is not installed here. "
            "Without it, mlflow.pyfunc.load_model(uri) predicts, and sparkdl.mlflow.load_module(uri) returns the "
            "torch module."
        ) from error
    from sparkdl.estimators.torch_model import TorchModel

    model = TorchModel.load(str(folder))
    return model._note_run(run_id or model.summary.run_id, str(model_uri))


def load_module(model_uri: str, dst_path: str | os.PathLike[str] | None = None) -> torch.nn.Module:
    """Load only the trained module, on CPU and in ``eval()`` mode; arguments and errors are those of `load_model`."""
    from sparkdl.model.saved_model import load_model as load_saved

    folder, _ = _download(model_uri, dst_path)
    return load_saved(folder / MODULE_FOLDER).module


def _download(model_uri: str, dst_path: str | os.PathLike[str] | None) -> tuple[Path, str | None]:
    """Return the local folder of the saved model, and the run's id."""
    import mlflow
    import yaml
    from mlflow.models import Model

    there = None if dst_path is None else open_location(absolute_url(dst_path)).path
    if str(model_uri).startswith(_SCHEMES):
        root = Path(mlflow.artifacts.download_artifacts(artifact_uri=str(model_uri), dst_path=there))
    else:
        url = absolute_url(model_uri)
        with reading_from(url):
            location = open_location(url)
            root = Path(location.path)
            if not location.is_local:
                if there is None:  # until this process exits: the model may have code that is imported later
                    there = tempfile.mkdtemp(prefix="sparkdl-")
                    atexit.register(shutil.rmtree, there, ignore_errors=True)
                root = Path(there)
                location.fetch_folder(root)
    try:
        # Model.load takes a URI, and would decode a folder's name.
        described = Model.from_dict(yaml.safe_load((root / "MLmodel").read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise SavedModelError(
            f"{model_uri} holds no model of MLflow: there is no MLmodel file in it."
        ) from error
    flavor = described.flavors.get(FLAVOR_NAME)
    if flavor is None:
        raise SavedModelError(
            f"{model_uri} was not logged by sparkdl: its flavors are {', '.join(described.flavors)}. "
            "Load it by one of those."
        )
    code = described.flavors["python_function"].get("code")
    if code is not None and str(root / str(code)) not in sys.path:
        sys.path.insert(
            0, str(root / str(code))
        )  # as MLflow does: pickles of the model refer to modules in it
    return root / flavor["data"], described.run_id


def save_model(
    model: TorchModel | torch.nn.Module,
    path: str | os.PathLike[str],
    mlflow_model: Model | None = None,
    *,
    signature: ModelSignature | None = None,
    input_example: Any = None,
    pip_requirements: Sequence[str] | None = None,
    extra_pip_requirements: Sequence[str] | None = None,
    code_paths: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    **of_module: Any,
) -> None:
    """Write a model as a model of MLflow, with the flavors ``sparkdl`` and ``python_function``.

    Args:
        model: model that a fit returned, or that was loaded; or a torch module, or another first argument of
            :meth:`~sparkdl.estimators.TorchModel.from_module`.
        path: path or URL of a folder that does not exist; a local one may be empty.
        mlflow_model: description of the model that MLflow passes; None for a new one.
        signature: signature of the model; None for the one that is derived from the model.
        input_example: input rows, as a pandas DataFrame; None for the first row of ``example`` of a torch module, and
            no example of a model.
        pip_requirements: packages that serving installs; None for torch and the other packages that the model needs, in
            the versions that are installed here. sparkdl need not be one of them, as the model contains its modules.
        extra_pip_requirements: further packages that serving installs, for example for your ``prepareFeatures``.
        code_paths: local files and folders with modules that the model needs and that no package contains.
        metadata: metadata for the MLmodel file.
        of_module: the other arguments of ``TorchModel.from_module`` for a torch module: ``example`` and so on.

    Raises:
        ParamTypeError: if ``model`` is neither, or a torch module without example rows.
        SavedModelError: if there is no such bucket, or another failure of a store that is not local.
        SerializationError: if a part of the model cannot be pickled.
        mlflow.exceptions.MlflowException: if the folder is not empty, or an argument does not fit.
    """
    options = FlavorOptions(
        signature=signature,
        input_example=input_example,
        pip_requirements=pip_requirements,
        extra_pip_requirements=tuple(extra_pip_requirements or ()),
        code_paths=code_paths,
        metadata=metadata,
    )
    there = open_location(absolute_url(path))
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
        spec = _save(model, of_module, folder)
        if there.is_local:
            save_flavor(spec, there.path, options, mlflow_model)
        else:
            from sparkdl.estimators.persistence import carry

            made = Path(folder, "mlflow_model")
            save_flavor(spec, made, options, mlflow_model)
            carry(made, path, last="MLmodel", overwrite=False, remedy="Choose another path, or remove it.")


def log_model(
    model: TorchModel | torch.nn.Module,
    name: str = "model",
    *,
    registered_model_name: str | None = None,
    registered_model_alias: str | None = None,
    await_registration_for: int = 300,
    run_id: str | None = None,
    signature: ModelSignature | None = None,
    input_example: Any = None,
    pip_requirements: Sequence[str] | None = None,
    extra_pip_requirements: Sequence[str] | None = None,
    code_paths: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    **of_module: Any,
) -> ModelInfo:
    """Log a model in a run and return MLflow's description of it, which has its ``model_uri``.

    Args:
        model: model or torch module, as for :func:`save_model`.
        name: name of the logged model; in MLflow 2 its folder in the run.
        registered_model_name: name under which a new version is registered; ``catalog.schema.model`` in Unity Catalog.
        registered_model_alias: alias of the new version.
        await_registration_for: seconds to wait until the version is ready.
        run_id: id of the run; None for the active run, or a new one.
        signature: signature of the model; this and the following arguments are those of :func:`save_model`.
        input_example: input rows.
        pip_requirements: packages that serving installs.
        extra_pip_requirements: further packages that serving installs.
        code_paths: local files and folders with modules.
        metadata: metadata for the MLmodel file.
        of_module: the other arguments of ``TorchModel.from_module`` for a torch module.

    Raises:
        ParamTypeError: if ``model`` is neither, or there is an alias without a registered name.
        ParamError: if MLflow's registry must refuse the name or the alias.
        SerializationError: if a part of the model cannot be pickled.
        mlflow.exceptions.MlflowException: if the server refuses the model.
    """
    if registered_model_alias is not None and registered_model_name is None:
        raise ParamTypeError(
            "registered_model_alias is set, and registered_model_name is not. Set the name of the model whose version "
            "gets the alias."
        )
    check_registration(registered_model_name, registered_model_alias)
    options = FlavorOptions(
        signature=signature,
        input_example=input_example,
        pip_requirements=pip_requirements,
        extra_pip_requirements=tuple(extra_pip_requirements or ()),
        code_paths=code_paths,
        metadata=metadata,
    )
    registration = None
    if registered_model_name is not None:
        registration = Registration(
            name=registered_model_name, alias=registered_model_alias, await_s=await_registration_for
        )
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
        return log_flavor(
            _save(model, of_module, folder), options, name=name, run_id=run_id, registration=registration
        )


def _save(model: Any, arguments: Mapping[str, Any], folder: str) -> LoggedModelSpec:
    """Save a model, or a module with the arguments of ``TorchModel.from_module``, to a folder."""
    from sparkdl.estimators.fit.tracking import save_for_mlflow
    from sparkdl.estimators.torch_model import TorchModel

    if not isinstance(model, TorchModel):
        if "example" not in arguments:
            raise ParamTypeError(
                f"sparkdl.mlflow takes a TorchModel, got {type(model).__module__}.{type(model).__name__}. With a torch "
                "module it takes the arguments of TorchModel.from_module, too: example=df, featuresCol=..., outputs=..."
            )
        from sparkdl.estimators.given_module import read_examples

        made = TorchModel.from_module(model, **arguments)
        rows = made._select_features(arguments["example"])
        return save_for_mlflow(made, folder, read_examples(made.saved, rows))
    if arguments:
        raise ParamTypeError(
            f"sparkdl.mlflow got {', '.join(arguments)}, which are for a torch module. A TorchModel has its own: leave "
            "them out."
        )
    return save_for_mlflow(model, folder)


def send_kept(
    store: Store | str | os.PathLike[str] | None = None, *, tracking_uri: str | None = None
) -> list[SentRun]:
    """Send all kept runs of a Store, the oldest first; remove those that are sent.

    Args:
        store: Store of the estimators, or its path or URL; None for the default Store.
        tracking_uri: URI of the server to send to; None for the servers of the fits.

    Returns:
        A record for each kept run: its ``run_id``, the ``model_uri`` of its model, and an ``error`` if the run could
        not be sent and is still kept.

    Raises:
        StoreError: if the Store cannot be read or written.
    """
    from sparkdl.data import Store
    from sparkdl.data.store.store import as_store

    return send_kept_runs(Store.default() if store is None else as_store(store), tracking_uri)


def autolog(
    log_models: bool = True,
    log_input_examples: bool = True,
    log_model_signatures: bool = True,
    log_datasets: bool = True,
    disable: bool = False,
    exclusive: bool = False,
    disable_for_unsupported_versions: bool = False,
    silent: bool = False,
    every_n_iter: int = 1,
    registered_model_name: str | None = None,
    extra_tags: Mapping[str, str] | None = None,
) -> None:
    """Set what fits of this process log to MLflow from now on. Without a call, fits log as with the defaults.

    Params of an estimator take precedence: ``tracking="on"`` over ``disable``, ``registeredModelName`` over
    ``registered_model_name``.

    Args:
        log_models: whether the model is logged.
        log_input_examples: whether the first row is logged with the model, as input example.
        log_model_signatures: whether the signature is logged with the model.
        log_datasets: whether the source of the rows and their hash are logged as an input of the run.
        disable: whether fits with ``tracking="auto"`` log nothing at all.
        exclusive: whether fits open runs of their own even if the user has opened a run.
        disable_for_unsupported_versions: accepted for compatibility with MLflow's own flavors; it has no effect.
        silent: whether warnings and messages of sparkdl about MLflow are suppressed, except the warning about an alias
            that is not moved because it points to a newer version.
        every_n_iter: number of epochs after which metrics are logged: 1 for every epoch, 2 for every second one.
        registered_model_name: name under which each model is registered as a new version; None to register none.
        extra_tags: additional tags of the runs.

    Raises:
        ImportError: if mlflow is not installed.
        ParamError: if ``every_n_iter`` is less than 1, or MLflow's registry must refuse the name.
    """
    try:
        import_module("mlflow")  # the fits report no error
    except ImportError as error:
        raise ImportError(
            f"sparkdl.autolog needs mlflow: {error}. {how_to_install('mlflow', 'mlflow')}"
        ) from error
    if every_n_iter < 1:
        raise ParamError(f"every_n_iter is {every_n_iter}. Give a number of epochs, 1 or more.")
    check_registration(registered_model_name, None)
    autologged.update(
        log_models=log_models,
        log_input_examples=log_input_examples,
        log_model_signatures=log_model_signatures,
        log_datasets=log_datasets,
        disable=disable,
        exclusive=exclusive,
        silent=silent,
        every_n_iter=every_n_iter,
        registered_model_name=registered_model_name,
        extra_tags=extra_tags,
    )
