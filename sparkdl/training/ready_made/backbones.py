"""Networks of torchvision and timm by name, as backbones of an image classifier. Runs on the *driver*.

``"torchvision:resnet18"`` and ``"timm:resnet18"``; the library is imported with the first of its names.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from traceback import walk_tb
from typing import Any

from torch import nn

from sparkdl.errors import ParamError
from sparkdl.training.ready_made.backbone_weights import load_fitting, read_weights, with_outputs

OWN = "residual"
LIBRARIES = ("torchvision", "timm")
NO_WEIGHTS, PRETRAINED = "none", "pretrained"


def check_backbone(name: str) -> None:
    """Check that there is a backbone of a name: :data:`OWN`, or ``"library:model"``.

    Raises:
        ParamError: if there is none, or its library is not installed.
    """
    if name == OWN:
        return
    library, model = _split(name)
    names = _names(library)
    if model not in names:
        near = difflib.get_close_matches(model, names, n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"It has {len(names)}, such as {names[0]}."
        raise ParamError(f"Param backbone is {name!r}, and {library} has no model {model!r}. {hint}")


def make_backbone(name: str, *, num_outputs: int, weights: str) -> nn.Module:
    """Return a network of a library with a last layer of so many outputs.

    Args:
        name: of the backbone, ``"library:model"``.
        num_outputs: of the last layer, which is new.
        weights: :data:`NO_WEIGHTS`; :data:`PRETRAINED` for those that the library fetches; or the path of a file.

    Raises:
        ParamError: if the library does not make it, or the weights are not there or those of something else.
    """
    library, model = _split(name)
    try:
        if library == "timm":
            is_pretrained = weights == PRETRAINED
            made: nn.Module = _library(library).create_model(
                model, pretrained=is_pretrained, num_classes=num_outputs
            )
        else:
            made = _of_torchvision(model, num_outputs, is_pretrained=weights == PRETRAINED)
    except ParamError:
        raise
    except Exception as error:
        fetched = " with weights that are fetched from the network" if weights == PRETRAINED else ""
        raise ParamError(
            f"Param backbone is {name!r}, which {library} does not make{fetched}: {type(error).__name__}: {error}"
        ) from error
    if weights not in (NO_WEIGHTS, PRETRAINED):
        load_fitting(made, read_weights(weights), num_outputs=num_outputs, path=weights)
    return made


def pretrained_scales(name: str) -> tuple[Sequence[float], Sequence[float]]:
    """Return the mean and the deviation of the channels, of pixels from 0 to 1, that a library's weights want.

    Raises:
        ParamError: if the library does not tell them, as of a model without such weights.
    """
    library, model = _split(name)
    try:
        if library == "timm":
            told = _library(library).get_pretrained_cfg(model)
        else:
            told = _library("torchvision.models").get_model_weights(model).DEFAULT.transforms()
        return told.mean, told.std
    except ParamError:
        raise
    except Exception as error:
        raise ParamError(
            f"Param backbone is {name!r}, and {library} does not tell how images are normalized for its pretrained "
            f"weights: {type(error).__name__}: {str(error).rstrip('.')}. Set normalization."
        ) from error


def _of_torchvision(model: str, num_outputs: int, *, is_pretrained: bool) -> nn.Module:
    models = _library("torchvision.models")
    if not is_pretrained:
        made: nn.Module = models.get_model(model, weights=None, num_classes=num_outputs)
        return made
    # "DEFAULT" is how torchvision calls the best weights that it has.
    return with_outputs(models.get_model(model, weights="DEFAULT"), num_outputs)


def _split(name: str) -> tuple[str, str]:
    library, _, model = name.partition(":")
    if library not in LIBRARIES or not model:
        raise ParamError(
            f"Param backbone is {name!r}. It takes {OWN!r}, or a name with its library, such as "
            "'torchvision:resnet18' or 'timm:resnet18'."
        )
    return library, model


def _library(module: str) -> Any:
    name = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # Of timm it may be torchvision that is missing.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        lacking = (missing or name).partition(".")[0]
        raise ParamError(
            f"Param backbone names {name}, which cannot be imported here: {error}. Install {lacking} on driver and "
            f"executors, in the version for their torch: pip install {lacking}. Or take backbone={OWN!r}."
        ) from error
    except Exception as error:  # a torchvision for another torch fails with RuntimeError
        failed = _failed_library(error) or name
        what = "which" if failed == name else f"which imports {failed}, and that"
        raise ParamError(
            f"Param backbone names {name}, {what} is installed and fails when it is imported: {type(error).__name__}: "
            f"{error}. {failed} may be made for another version or build of torch: install the one for yours."
        ) from error


def _failed_library(error: Exception) -> str | None:
    """The library of which a module was imported when an exception was raised, in it or in what it called."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    libraries = [module.partition(".")[0] for module in modules]
    return next((library for library in reversed(libraries) if library in LIBRARIES), None)


def _names(library: str) -> list[str]:
    if library == "timm":
        timm = _library(library)
        # With weights, names have a tag behind a point that tells which ones; without it, timm takes its default.
        return [*timm.list_models(), *timm.list_models(pretrained=True)]
    models = _library("torchvision.models")
    return list(
        models.list_models(module=models)
    )  # those for whole images, neither for parts of them nor for videos
