"""What MLflow records about a saved model: signature, input example, requirements, dataset and version.

The dataset describes the rows of a fit, and is an input of the run. A logged model is registered as one version,
however often the registration is retried.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.errors import ParamError
from sparkdl.tracking.start import reporting_to

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.models import ModelSignature

_logger = logging.getLogger(__name__)


_PARAM_TYPES = {bool: "boolean", int: "long", float: "double", str: "string"}
_UNKNOWN = "unknown"
_REQUIREMENTS = ("cloudpickle", "numpy", "pandas", "safetensors", "torch")


@dataclass(frozen=True, kw_only=True)
class LoggedColumn:
    """An input or output column of a model.

    Attributes:
        name: name of the column.
        kind: type of the elements: ``"boolean"``, ``"long"``, ``"double"``, ``"string"``, ``"binary"`` or
            ``"timestamp"``; ``"any"`` if MLflow has no type for them.
        depth: number of nested arrays around the elements.
    """

    name: str
    kind: str
    depth: int = 0


@dataclass(frozen=True, kw_only=True)
class LoggedModelSpec:
    """A saved model and its description for MLflow.

    Attributes:
        folder: local folder of the saved model, in the format in which a TorchModel is saved.
        inputs: the input columns.
        example: input example: one row, by name of the column; None for no example.
        outputs: the output columns.
        params: default values of the params of an inference, by name.
        modules: full names of the modules that the model imports, from any package.
        classes: names of the classes of each output, by name of the output, in the order of their probabilities.
        epoch: number of the epoch that the weights are from; 0 if it is not known.
        metrics: loss and metrics of that epoch, by name.
    """

    folder: str | os.PathLike[str]
    inputs: tuple[LoggedColumn, ...]
    outputs: tuple[LoggedColumn, ...]
    example: Mapping[str, Any] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    classes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    epoch: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


def pip_requirements(modules: Iterable[str] = ()) -> list[str]:
    """Return the pip requirements of a process that serves a model, with the versions that are installed here.

    sparkdl is not one of them: the model contains its modules.

    Args:
        modules: full names of the modules that the model imports. Modules that belong to no installed package, such as
            files of the user, are left out.
    """
    modules = [module for module in modules if module.partition(".")[0] != "sparkdl"]
    return [_requirement(package) for package in sorted({*_REQUIREMENTS, *_packages_of(modules)})]


def _packages_of(modules: Iterable[str]) -> set[str]:
    """Return the installed packages that contain the modules."""
    modules_in: dict[str, list[str]] = {}
    for module in modules:
        modules_in.setdefault(module.partition(".")[0], []).append(module)
    having: dict[str, list[metadata.Distribution]] = {}
    for distribution in metadata.distributions():
        for top_level in modules_in.keys() & _top_levels_of(distribution):
            having.setdefault(top_level, []).append(distribution)
    packages: set[str] = set()
    for top_level, candidates in having.items():
        is_shared = len({candidate.name for candidate in candidates}) > 1  # a namespace, like google
        packages.update(
            candidate.name
            for candidate in candidates
            if not is_shared or _has_module(candidate, modules_in[top_level])
        )
    return packages


def _top_levels_of(distribution: metadata.Distribution) -> set[str]:
    """Return the names of the modules and packages that a distribution has at the top."""
    declared = (distribution.read_text("top_level.txt") or "").split()
    if declared:  # setuptools also writes empty ones
        return set(declared)
    return {path.partition("/")[0].partition(".")[0] for path in _paths_in(distribution)}


def _has_module(distribution: metadata.Distribution, modules: Sequence[str]) -> bool:
    paths = [module.replace(".", "/") for module in modules]
    # source files or shared libraries
    starts = tuple(start for path in paths for start in (f"{path}.", f"{path}/__init__."))
    return any(path.startswith(starts) for path in _paths_in(distribution))


def _paths_in(distribution: metadata.Distribution) -> list[str]:
    """Return the paths of a distribution's files, from the list that pip writes.

    :func:`importlib.metadata.packages_distributions` looks at each file, which takes about a second for 300 packages.
    """
    listed = distribution.read_text("RECORD")
    if listed is None:
        return [path.as_posix() for path in distribution.files or ()]
    return [line.partition(",")[0] for line in listed.splitlines()]


def _requirement(package: str) -> str:
    # No public index has versions with a local build tag ("+cpu", "+cu128").
    version = installed_version(package).partition("+")[0]
    return package if version == _UNKNOWN else f"{package}=={version}"


def installed_version(package: str) -> str:
    """Return the version of an installed package; ``"unknown"`` if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return _UNKNOWN


def signature_of(model: LoggedModelSpec) -> ModelSignature:
    """Return MLflow's signature of a model."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    return ModelSignature(
        inputs=Schema([ColSpec(_input_type(column), column.name) for column in model.inputs]),
        outputs=Schema([ColSpec(_column_type(column), column.name) for column in model.outputs]),
        params=ParamSchema(
            [ParamSpec(name, _PARAM_TYPES[type(value)], value) for name, value in model.params.items()]
        ),
    )


def _input_type(column: LoggedColumn) -> Any:
    """Return the type of an input column.

    MLflow refuses whole numbers in an array of doubles, and JavaScript and Go write 1.0 as 1. An array is therefore a
    value of any type; the model converts it, and checks its numbers.
    """
    if not _has_any_type():
        return _column_type(replace(column, kind="long") if column.kind == "timestamp" else column)
    is_checked_here = column.depth and column.kind not in ("string", "binary")
    return _column_type(replace(column, kind="any", depth=0) if is_checked_here else column)


def _column_type(column: LoggedColumn) -> Any:
    from mlflow.types import DataType, schema
    from mlflow.types.schema import Array

    if column.kind in ("any", "timestamp"):
        # Without AnyType, a value of several forms, such as an image, has to be bytes.
        kind: Any = schema.AnyType() if _has_any_type() else DataType.binary
    else:
        kind = DataType[column.kind]
    for _ in range(column.depth):
        kind = Array(kind)
    return kind


def _has_any_type() -> bool:
    """Return whether MLflow has a type for values of several forms, as it has since 2.19."""
    from mlflow.types import schema

    return hasattr(schema, "AnyType")


def example_of(model: LoggedModelSpec) -> Any:
    """Return the input example as a DataFrame of one row; None if there is none that MLflow can load again."""
    import pandas as pd

    if model.example is None:
        return None
    if not _has_any_type() and any(column.kind == "any" for column in model.inputs):
        return None  # MLflow would not save it as bytes, and could not load it
    return pd.DataFrame({name: [_plain(value)] for name, value in model.example.items()})


def _plain(value: Any) -> Any:
    """Convert a value of the example for JSON, to lists and numbers of Python; floats in double precision."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return (value.astype(np.float64) if value.dtype.kind == "f" else value).tolist()
    if isinstance(value, np.ndarray | list):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


@dataclass(frozen=True, kw_only=True)
class LoggedDataset:
    """The fields of a dataset of MLflow.

    Attributes:
        name: name that MLflow shows.
        digest: hash of the data, up to 36 characters.
        source_type: type of the source, such as ``"spark"`` or ``"local"``.
        source: location of the source, as JSON.
        schema: columns of the dataset, as JSON.
        profile: statistics of the dataset, as JSON.
    """

    name: str
    digest: str
    source_type: str
    source: str
    schema: str
    profile: str


MODEL_TAG = "sparkdl.model_uri"
"""Tag of a registered version, with the URI of the logged model."""


@dataclass(frozen=True, kw_only=True)
class Registration:
    """The name and alias of a registered model.

    Attributes:
        name: name of the registered model; ``catalog.schema.model`` in Unity Catalog.
        alias: alias to set to the new version; None for no alias.
        await_s: seconds to wait until the version is ready.
    """

    name: str
    alias: str | None = None
    await_s: int = 300


def check_registration(name: str | None, alias: str | None) -> None:
    """Check a name and an alias by the rules of MLflow's registry, which a server would apply only after the fit.

    Raises:
        ParamError: if the registry must refuse one of them.
    """
    if name is not None and (
        not name.strip() or re.search("[/:]", name) or name.startswith("..") or name == "."
    ):
        raise ParamError(
            f"The name of a registered model cannot be {name!r}. MLflow takes no empty name, and none that has a "
            "slash or colon or is a relative path."
        )
    if alias is None:
        return
    if not re.fullmatch(r"[\w-]{1,255}", alias):
        raise ParamError(
            f"The alias of a registered model cannot be {alias!r}. MLflow takes up to 255 letters, digits, underscores "
            "and hyphens."
        )
    if re.fullmatch(r"latest|v\d+", alias, re.IGNORECASE):
        raise ParamError(
            f"The alias of a registered model cannot be {alias!r}: MLflow reserves 'latest', 'v1', 'v2' and so on for "
            "versions. Choose another word, such as 'champion'."
        )


def register(
    client: MlflowClient, model_uri: str, registration: Registration, *, identity: str | None = None
) -> str:
    """Register a logged model, unless it is already registered, and return its version.

    An alias that points to a newer version is not moved. ``identity`` tells the model from others that were logged
    under the same URI; the URI is enough when None.

    Raises:
        mlflow.exceptions.MlflowException: if the server refuses the registration.
    """
    import mlflow

    identity = identity or model_uri
    version = _version_of(client, identity, registration.name)
    if version is None:
        with reporting_to(client.tracking_uri):
            made = mlflow.register_model(
                model_uri,
                registration.name,
                await_registration_for=registration.await_s,
                tags={MODEL_TAG: identity},
            )
        version = str(made.version)
    if registration.alias is not None:
        _point(client, registration.name, registration.alias, version)
    return version


def _version_of(client: MlflowClient, identity: str, name: str) -> str | None:
    quote = '"' if "'" in name else "'"
    versions = client.search_model_versions(f"name = {quote}{name}{quote}")
    return next(
        (str(version.version) for version in versions if version.tags.get(MODEL_TAG) == identity), None
    )


def _point(client: MlflowClient, name: str, alias: str, version: str) -> None:
    aliases = client.get_registered_model(name).aliases
    current = next((int(number) for known, number in aliases.items() if known.lower() == alias.lower()), 0)
    if current > int(version):
        _logger.warning(
            "The alias %s of %s stays at version %d, as the model was registered as the older version %s.",
            alias,
            name,
            current,
            version,
        )
        return
    client.set_registered_model_alias(name, alias, version)
