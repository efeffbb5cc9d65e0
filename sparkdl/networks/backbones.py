"""Networks of torchvision and timm by name: as backbones of an image classifier, and as they were trained.

A backbone has a new last layer. Weights can be loaded from a file. Names have the form ``"torchvision:resnet18"`` or
``"timm:resnet18"``; a library is imported when the first of its names is used.
"""

from __future__ import annotations

import importlib
import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sparkdl.errors import ParamError, did_you_mean, list_names
from sparkdl.foreign_errors import errors_as, how_to_install

_WRAPPED = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts often save the weights beside other values."""

_PREFIXES = ("module.", "_orig_mod.", "model.", "net.")
"""What ``DataParallel``, ``torch.compile`` and modules that hold the network put before the names of its weights."""


def read_backbone_weights(path: str) -> dict[str, Tensor]:
    """Return the tensors of a local file by name: of a safetensors file, or a ``state_dict`` written by ``torch.save``.

    The weights may lie beside other values, as checkpoints of timm's and Lightning's training have them. Only tensors,
    plain values and the arguments of a script are unpickled (``weights_only=True``).

    Raises:
        ParamError: if there is no such file, or it holds something else.
    """
    if not Path(path).is_file():
        raise ParamError(f"The file of weights is {path!r}, and there is no such file on the driver.")
    advice = "It takes a file of safetensors, or one that torch.save(model.state_dict(), path) wrote."
    with errors_as(ParamError, f"The file of weights is {path!r}, which cannot be read", advice):
        try:
            with torch.serialization.safe_globals([Namespace]):
                scope: Any = (
                    load_file(path)
                    if path.endswith(".safetensors")
                    else torch.load(path, map_location="cpu", weights_only=True)
                )
        except UnpicklingError as error:
            if (refused := re.search(r"Unsupported global: GLOBAL (\S+)", str(error))) is None:
                raise
            raise ParamError(
                f"The file of weights is {path!r}, which holds a {refused[1]}: it is not unpickled, as that could run "
                "code. Load the file yourself if you trust it, and save the weights alone: torch.save("
                "model.state_dict(), path). To predict, TorchModel.from_module(model, imageTransform=...) takes the "
                "network itself."
            ) from error
    for name in _WRAPPED:
        if isinstance(scope, Mapping) and isinstance(scope.get(name), Mapping):
            scope = scope[name]
    if not isinstance(scope, Mapping) or not all(isinstance(tensor, Tensor) for tensor in scope.values()):
        raise ParamError(
            f"The file of weights is {path!r}, which does not hold tensors by name. Write it with "
            "torch.save(model.state_dict(), path)."
        )
    weights = {str(name): tensor for name, tensor in scope.items()}
    while weights and (
        prefixes := [part for part in _PREFIXES if all(name.startswith(part) for name in weights)]
    ):
        weights = {name.removeprefix(prefixes[0]): tensor for name, tensor in weights.items()}
    return weights


def load_fitting(module: nn.Module, weights: Mapping[str, Tensor], *, num_outputs: int, path: str) -> None:
    """Load weights into a module, except those of last layers for a different number of classes, which stay unchanged.

    A layer counts as a last one if it has one output per class, both in the module and in the weights: a layer whose
    width only happens to equal the number of classes is not one.

    Args:
        module: module into which the weights are loaded.
        weights: weights by name.
        num_outputs: number of classes of the module. Its last layer may be missing from the weights.
        path: path of the weights, used in error messages.

    Raises:
        ParamError: if other tensors are missing, left over or of another shape.
    """
    tensors = module.state_dict()
    last = last_layers(module, num_outputs)
    of_last = weights.get(f"{last[-1]}.weight") if last else None
    num_given = None if of_last is None or of_last.dim() == 0 else len(of_last)
    of_classes = {
        f"{layer}.{part}" for layer in _layers_of(module, num_outputs) for part in ("weight", "bias")
    }
    fitting, missing = {}, []
    for name, tensor in tensors.items():
        weight = weights.get(name)
        if weight is not None and weight.shape == tensor.shape:
            fitting[name] = weight
        elif weight is None:
            missing += [name] if name.rpartition(".")[0] not in last else []
        elif name not in of_classes or weight.shape != (num_given, *tensor.shape[1:]):
            missing.append(name)
    spare = [name for name in weights if name not in tensors]
    if missing or spare:
        differences = [
            f"{what}: {list_names(names, 3)}"
            for what, names in (("missing or of another shape", missing), ("left over", spare))
            if names
        ]
        raise ParamError(
            f"The file of weights is {path!r}, which holds the weights of another network "
            f"({'; '.join(differences)}). Name the backbone that they belong to."
        )
    # The module's state_dict has the versions of its layers, without which torchvision's mnasnet loads no weights.
    tensors.update(fitting)
    module.load_state_dict(tensors)


def with_outputs(module: nn.Module, num_outputs: int) -> nn.Module:
    """Replace the last layer of a network, for the 1000 classes of ImageNet, by a new one, and return the network.

    Raises:
        ParamError: if the network has no such layer.
    """
    names = last_layers(module, 1000)
    if not names:
        raise ParamError("The network has no last layer for the 1000 classes of ImageNet.")
    name = names[-1]
    layer: Any = module.get_submodule(name)
    has_bias = layer.bias is not None
    new: nn.Module
    if isinstance(layer, nn.Linear):
        new = nn.Linear(layer.in_features, num_outputs, bias=has_bias)
    else:
        new = nn.Conv2d(
            layer.in_channels, num_outputs, layer.kernel_size, layer.stride, layer.padding, bias=has_bias
        )
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, new)
    return module


def without_classifier(module: nn.Module) -> nn.Module:
    """Return a trained network that returns what its last layer takes: a vector for each image.

    Raises:
        ParamError: if the network has no such layer.
    """
    reset: Any = getattr(module, "reset_classifier", None)
    if reset is not None:  # of timm
        reset(0)
        return module
    layers = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    if not layers:
        raise ParamError(f"The network {type(module).__name__} has no last layer to leave out.")
    parent, _, child = layers[-1].rpartition(".")
    setattr(module.get_submodule(parent), child, nn.Identity())
    return module


def last_layers(module: nn.Module, num_outputs: int) -> list[str]:
    """Return the names of the layers for ``num_outputs`` classes: one, or several in a distilled network of timm."""
    layers = _layers_of(module, num_outputs)
    classifier: Any = getattr(module, "get_classifier", tuple)()
    parts = classifier if isinstance(classifier, tuple) else (classifier,)
    of_classifier = {id(layer) for part in parts for layer in part.modules()}
    return [name for name in layers if id(module.get_submodule(name)) in of_classifier] or layers[-1:]


def _layers_of(module: nn.Module, num_outputs: int) -> list[str]:
    """The names of all linear layers and convolutions with ``num_outputs`` outputs."""
    return [
        name
        for name, layer in module.named_modules()
        if (isinstance(layer, nn.Linear) and layer.out_features == num_outputs)
        or (isinstance(layer, nn.Conv2d) and layer.out_channels == num_outputs)
    ]


OWN = "residual"
LIBRARIES = ("torchvision", "timm")
NO_WEIGHTS, PRETRAINED = "none", "pretrained"


def check_backbone(name: str) -> None:
    """Check that there is a backbone with this name: :data:`OWN`, or ``"library:model"``.

    Raises:
        ParamError: if there is none, or its library is not installed.
    """
    if name == OWN:
        return
    library, model = _split(name)
    names = _names(library)
    if model not in names:
        hint = did_you_mean(model, names, most=3, otherwise=f"It has {len(names)}, such as {names[0]}.")
        raise ParamError(f"The network is {name!r}, and {library} has no model {model!r}. {hint}")


def make_backbone(name: str, *, num_outputs: int | None, weights: str) -> nn.Module:
    """Return a network of a library, with a new last layer.

    Args:
        name: name of the backbone, ``"library:model"``.
        num_outputs: number of outputs of the last layer; None for the pretrained last layer.
        weights: :data:`NO_WEIGHTS`; :data:`PRETRAINED` for weights that the library fetches; or the path of a file.

    Raises:
        ParamError: if the library cannot create the network, or the weights are missing or of another network.
    """
    library, model = _split(name)
    what, advice = f"The network is {name!r}, which {library} cannot create", ""
    if weights == PRETRAINED:
        what += " with weights that are fetched from the network"
        advice = "Where there is none, give the path of a file of weights."
    classes = {} if num_outputs is None else {"num_classes": num_outputs}
    with errors_as(ParamError, what, advice):
        if library == "timm":
            made: nn.Module = _library(library).create_model(
                model, pretrained=weights == PRETRAINED, **classes
            )
        elif weights == PRETRAINED:  # "DEFAULT" is torchvision's name for its best weights
            made = _library("torchvision.models").get_model(model, weights="DEFAULT")
            made = made if num_outputs is None else with_outputs(made, num_outputs)
        else:
            made = _library("torchvision.models").get_model(model, weights=None, **classes)
    if weights not in (NO_WEIGHTS, PRETRAINED):
        assert num_outputs is not None, "the weights of a file may be of other classes"
        load_fitting(made, read_backbone_weights(weights), num_outputs=num_outputs, path=weights)
    return made


def pretrained_scales(name: str) -> tuple[Sequence[float], Sequence[float]]:
    """Return the mean and the deviation of each channel, for pixels from 0 to 1, that a library's weights expect.

    Raises:
        ParamError: if the library does not have them, as for a model without pretrained weights.
    """
    library, model = _split(name)
    what = f"The network is {name!r}, and {library} does not say how its pretrained weights take images"
    with errors_as(ParamError, what, "Set normalization."):
        if library == "timm":
            scale = _library(library).get_pretrained_cfg(model)
        else:
            scale = _library("torchvision.models").get_model_weights(model).DEFAULT.transforms()
        return scale.mean, scale.std


def is_of_library(name: str) -> bool:
    """Whether a name has the form of a network of a library."""
    return name.partition(":")[0] in LIBRARIES


Trained: TypeAlias = tuple[nn.Module, Callable[[Any], Any], tuple[str, ...] | None]
"""A network as it was trained, the function that makes its input of an image of Pillow, and the labels of its classes,
None if the library does not know them."""


def load_trained_network(name: str, weights: str | None) -> Trained:
    """Return a network with trained weights, and with the transform that its library has for them.

    Args:
        name: name of the network, ``"library:model"``.
        weights: path of a file with the weights of the whole network, whose last layer says how many classes there
            are; None for the weights that the library fetches.

    Raises:
        ParamError: if there is no such network, or the weights are missing or of another network.
    """
    check_backbone(name)
    library, model = _split(name)
    if weights is None:
        module = make_backbone(name, num_outputs=None, weights=PRETRAINED)
    else:
        module = _with_all_weights(name, read_backbone_weights(weights), weights)
    transform, labels = _recipe(library, model, module)
    return module, transform, labels if weights is None else None


def load_timm_folder(folder: str) -> Trained:
    """Return the network in a local folder that ``timm.models.save_for_hf`` wrote, or that was fetched from the hub.

    Raises:
        ParamError: if timm cannot load it.
    """
    timm = _library("timm")
    with errors_as(ParamError, f"The folder {folder!r} has a network of timm, which cannot load it"):
        module: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return module, *_recipe("timm", "", module)


def _with_all_weights(name: str, weights: Mapping[str, Tensor], path: str) -> nn.Module:
    """Return a network with the number of classes of a file, and with all of its weights."""
    module = make_backbone(name, num_outputs=1000, weights=NO_WEIGHTS)
    (last,) = last_layers(module, 1000)[-1:] or [""]
    weight = weights.get(f"{last}.weight")
    if weight is None:
        raise ParamError(
            f"The file of weights is {path!r}, which holds no weights of {last}, the last layer of {name!r}. To "
            f"predict, all weights are needed; ImageClassifier(backbone={name!r}, backboneWeights=...) trains a new "
            "last layer."
        )
    if len(weight) != 1000:
        module = make_backbone(name, num_outputs=len(weight), weights=NO_WEIGHTS)
    load_fitting(module, weights, num_outputs=len(weight), path=path)
    return module


def _recipe(
    library: str, model: str, module: nn.Module
) -> tuple[Callable[[Any], Any], tuple[str, ...] | None]:
    """Return the transform of a library for a network, and the labels of its own weights, None if it has none."""
    transform: Callable[[Any], Any]
    if library == "torchvision":
        weights = _library("torchvision.models").get_model_weights(model).DEFAULT
        transform = weights.transforms()
        return transform, tuple(weights.meta["categories"])
    data = _library("timm.data")
    transform = data.create_transform(**data.resolve_model_data_config(module))
    configured: Any = getattr(module, "pretrained_cfg", {}).get("label_names")
    if configured:
        return transform, tuple(map(str, configured))
    subset = data.infer_imagenet_subset(module)
    if subset is None:
        return transform, None
    classes = data.ImageNetInfo(subset)
    return transform, tuple(classes.index_to_description(index) for index in range(classes.num_classes()))


def _split(name: str) -> tuple[str, str]:
    library, _, model = name.partition(":")
    if library not in LIBRARIES or not model:
        raise ParamError(
            f"The network is {name!r}, and takes a name with its library, such as 'torchvision:resnet18' or "
            f"'timm:resnet18'. ImageClassifier also takes {OWN!r}."
        )
    return library, model


def _library(module: str) -> Any:
    name = module.partition(".")[0]
    # timm imports torchvision, and an installed one may be for another torch.
    packages = ["--upgrade", "torchvision", *([] if name == "torchvision" else [name])]
    advice = (
        f"It has to be installed on driver and executors, and torchvision in the version for their torch. "
        f"{how_to_install('backbones', *packages)}"
    )
    # A torchvision for another torch fails with RuntimeError.
    with errors_as(ParamError, f"The network is of {name}, which cannot be imported here", advice):
        return importlib.import_module(module)


def _names(library: str) -> list[str]:
    if library == "timm":
        timm = _library(library)
        # Names of pretrained weights have a tag after a dot; without a tag, timm uses its default weights.
        return [*timm.list_models(), *timm.list_models(pretrained=True)]
    models = _library("torchvision.models")
    return list(
        models.list_models(module=models)
    )  # models for whole images, not for segmentation, detection or videos
