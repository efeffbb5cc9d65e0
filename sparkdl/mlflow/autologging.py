"""Switches of what fits log by themselves, as ``autolog`` of MLflow's own flavors has them. Runs on the *driver*."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sparkdl.errors import ParamError
from sparkdl.tracking.switches import INTEGRATION


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
    """Choose what fits of this process log to MLflow from now on; they log without it too, as with its defaults.

    Params of an estimator go before: ``tracking="on"`` before ``disable``, ``registeredModelName`` before
    ``registered_model_name``.

    Args:
        log_models: whether the model is logged.
        log_input_examples: whether the first row is logged with it as input example.
        log_model_signatures: whether the signature is.
        log_datasets: whether the source of the rows and their hash are logged as an input of the run.
        disable: whether fits with ``tracking="auto"`` log nothing at all.
        exclusive: whether fits leave a run alone that the user has opened, and open runs of their own.
        disable_for_unsupported_versions: taken as MLflow's own flavors take it, and of no effect: MLflow holds no list
            of the versions of sparkdl, which works with each that it installs beside.
        silent: whether warnings and messages of sparkdl about MLflow are left out, but for that of an alias which
            stays where it is, as a newer version has it.
        every_n_iter: metrics of every so many epochs are logged.
        registered_model_name: name under which each model is registered as a new version.
        extra_tags: tags of the runs.

    Raises:
        ImportError: if mlflow is not installed.
        ParamError: if ``every_n_iter`` is less than 1.
    """
    if every_n_iter < 1:
        raise ParamError(f"every_n_iter is {every_n_iter}. Give a number of epochs, 1 or more.")
    _integrated()(
        log_models=log_models,
        log_input_examples=log_input_examples,
        log_model_signatures=log_model_signatures,
        log_datasets=log_datasets,
        disable=disable,
        exclusive=exclusive,
        disable_for_unsupported_versions=disable_for_unsupported_versions,
        silent=silent,
        every_n_iter=every_n_iter,
        registered_model_name=registered_model_name,
        extra_tags=extra_tags,
    )


def _integrated() -> Callable[..., None]:
    """The function by which MLflow notes the arguments, and obeys those that are about MLflow itself."""
    from mlflow.utils.autologging_utils import autologging_integration

    integrated: Callable[..., None] = autologging_integration(INTEGRATION)(_note)
    return integrated


def _note(
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
    """What MLflow keeps of the arguments is all that is needed: fits ask for it."""
