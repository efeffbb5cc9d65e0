"""Registers a logged model as a version, once however often it is tried. Runs on the *driver*."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.tracking.tracking_uri import reporting_to

if TYPE_CHECKING:
    from mlflow import MlflowClient

MODEL_TAG = "sparkdl.model_uri"
"""Tag of a version: the logged model that it was made of."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Registration:
    """Under what a logged model is registered.

    Attributes:
        name: of the registered model; ``catalog.schema.model`` in Unity Catalog.
        alias: that is set to the new version; None for none.
        await_s: how long to wait until the version is ready.
    """

    name: str
    alias: str | None = None
    await_s: int = 300


def register(client: MlflowClient, model_uri: str, registration: Registration) -> str:
    """Register a logged model, unless that has been done, and return its version.

    An alias that names a newer version already stays there.

    Raises:
        mlflow.exceptions.MlflowException: if the server does not take it.
    """
    import mlflow

    version = _version_of(client, model_uri, registration.name)
    if version is None:
        with reporting_to(client.tracking_uri):
            made = mlflow.register_model(
                model_uri,
                registration.name,
                await_registration_for=registration.await_s,
                tags={MODEL_TAG: model_uri},
            )
        version = str(made.version)
    if registration.alias is not None:
        _point(client, registration.name, registration.alias, version)
    return version


def _version_of(client: MlflowClient, model_uri: str, name: str) -> str | None:
    found = client.search_model_versions(f"name = '{name}'")
    return next((str(each.version) for each in found if each.tags.get(MODEL_TAG) == model_uri), None)


def _point(client: MlflowClient, name: str, alias: str, version: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        current = int(client.get_model_version_by_alias(name, alias).version)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        current = 0  # nothing has the alias
    if current > int(version):
        _logger.warning(
            "The alias %s of %s stays with version %d, as the model that was registered now is of version %s.",
            alias,
            name,
            current,
            version,
        )
        return
    client.set_registered_model_alias(name, alias, version)
