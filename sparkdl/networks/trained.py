"""Networks that were trained elsewhere, with the inputs that they take: of Hugging Face, timm and torchvision.

Runs on the *driver*. A model of Hugging Face is in a local folder, or on its hub, from which huggingface_hub fetches
the files to its cache. A network of timm or torchvision has a name such as ``"timm:resnet18"``.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ParamError, list_names
from sparkdl.foreign_errors import errors_as, needing
from sparkdl.networks.backbones import (
    is_of_library,
    load_timm_folder,
    load_trained_network,
    without_classifier,
)
from sparkdl.networks.images import TransformedImages
from sparkdl.networks.pretrained import (
    ImageEmbedding,
    PretrainedTextNetwork,
    TextEmbedding,
    check_folder,
    fitting_inputs,
    import_transformers,
    load_parts,
    names_lacking,
    taken_names,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sparkdl.model.losses import PredictionKind

IMAGES, IMAGE_EMBEDDINGS, GENERATION = "image-classification", "image-feature-extraction", "text-generation"
_CLASSES, _EMBEDDINGS = "text-classification", "feature-extraction"
TASKS_OF_IMAGES = (IMAGES, IMAGE_EMBEDDINGS)
TASKS = (_CLASSES, _EMBEDDINGS, GENERATION, *TASKS_OF_IMAGES)
"""Names of ``transformers.pipeline`` for what models of Hugging Face predict."""

_OTHER_NAMES = {"sentiment-analysis": _CLASSES}
"""Further names that ``transformers.pipeline`` has for a task."""

_TASKS_OF_CLASSES = {
    "ForSequenceClassification": _CLASSES,
    "ForImageClassification": IMAGES,
    "ForCausalLM": GENERATION,
    "LMHeadModel": GENERATION,
    "ForMaskedLM": _EMBEDDINGS,
    "Model": _EMBEDDINGS,
}
"""Tasks by the ends of the names of transformers' classes, the longer ends first."""

_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.safetensors")
_OTHER_WEIGHTS = ("pytorch_model*.bin",)
_NOT_READ = ("*/*", "consolidated*")
"""Patterns of files on the hub: those that transformers reads, older weights in place of safetensors, and folders and
copies of the weights for other libraries."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a trained network is.

    Attributes:
        name: local folder of Hugging Face, or name of a network of timm or torchvision.
        task: one of :data:`TASKS`.
    """

    name: str
    task: str


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A network as it was trained, and what it takes and returns.

    Attributes:
        network: the network.
        prepare: function that makes its inputs of a column, saved with the model.
        kind: meaning of its outputs.
        labels: labels of the classes, each once; None if they are not known, or it predicts no classes.
    """

    network: nn.Module
    prepare: Callable[[dict[str, Any]], Any]
    kind: PredictionKind
    labels: tuple[str, ...] | None


def find_source(pretrained: str, *, task: str | None, revision: str | None) -> Source:
    """Return where a network is, after fetching it from the hub if it is neither a folder nor of a library.

    Args:
        pretrained: local folder, id on the hub, or name of a network of a library.
        task: what it predicts, one of :data:`TASKS` or ``"sentiment-analysis"``; None for what its configuration says.
        revision: branch, tag or commit on the hub; None for its main branch.

    Raises:
        ParamError: if there is no such task or model, a library is missing, or ``revision`` does not apply.
    """
    task = _OTHER_NAMES.get(task or "", task)
    if task is not None and task not in TASKS:
        raise ParamError(
            f"task is {task!r}, and TorchModel.from_pretrained takes {', '.join(map(repr, TASKS))}."
        )
    is_local = Path(pretrained).is_dir()
    if revision is not None and (is_local or is_of_library(pretrained)):
        raise ParamError(
            f"revision is {revision!r}, which is for a model on the hub, and {pretrained!r} is "
            f"{'a local folder' if is_local else 'a network of a library'}. Leave it out."
        )
    folder = pretrained if is_local or is_of_library(pretrained) else _fetch(pretrained, revision)
    if is_of_library(pretrained) or _is_of_timm(folder):
        if task not in (None, *TASKS_OF_IMAGES):
            tasks = " or ".join(map(repr, TASKS_OF_IMAGES))
            raise ParamError(f"task is {task!r}, and {pretrained!r} is a network for {tasks}.")
        return Source(name=folder, task=task or IMAGES)
    check_folder(folder)
    return Source(name=folder, task=task or _task_of(folder))


def load_trained(source: Source, *, column: str, max_length: int, weights: str | None) -> TrainedModel:
    """Return a network with its inputs; for all tasks but :data:`GENERATION`.

    Args:
        source: where it is.
        column: name of the column of texts or images.
        max_length: number of tokens to which longer texts are cut.
        weights: path of a file with weights, for a network of a library; None for those of the library or the folder.

    Raises:
        ParamError: if the folder holds no model that was trained for the task, or weights do not fit.
    """
    of_library = is_of_library(source.name)
    if of_library or (weights is None and _is_of_timm(source.name)):
        module, transform, labels = (
            load_trained_network(source.name, weights) if of_library else load_timm_folder(source.name)
        )
        inputs = TransformedImages(column=column, transform=transform)
        if source.task == IMAGE_EMBEDDINGS:
            return TrainedModel(network=without_classifier(module), prepare=inputs, kind="value", labels=None)
        return TrainedModel(
            network=module, prepare=inputs, kind="class", labels=labels and tell_apart(labels)
        )
    if weights is not None:
        raise ParamError(
            f"weights is {weights!r}, which are for a network of timm or torchvision, and {source.name!r} has its own."
        )
    if source.task in TASKS_OF_IMAGES:
        return _load_images(source, column)
    return _load_texts(source, column, max_length)


def _fetch(name: str, revision: str | None) -> str:
    """Fetch a model from the hub to the cache of huggingface_hub, unless it is there, and return its folder."""
    with needing(f"Param pretrained is {name!r}, which is no folder here. The hub", "text", "transformers"):
        hub = importlib.import_module("huggingface_hub")
    network = name.removeprefix("timm/")
    is_of_timm = network != name or ("/" not in name and _has_timm(name))
    hint = f" A name of a network of timm is given as 'timm:{network}'." if is_of_timm else ""
    advice = (
        "Check the name, and log in with `hf auth login` if the model is not public. Where the hub cannot be reached, "
        f"run `hf download {name} --local-dir FOLDER` elsewhere, and give the folder.{hint}"
    )
    what = f"Param pretrained is {name!r}, which is not a folder here, and cannot be fetched from Hugging Face's hub"
    with errors_as(ParamError, what, advice):
        folder: str = hub.snapshot_download(
            name, revision=revision, allow_patterns=_FILES, ignore_patterns=_NOT_READ
        )
        if not any(Path(folder).glob("*.safetensors")):
            hub.snapshot_download(name, revision=revision, allow_patterns=_OTHER_WEIGHTS)
    return folder


def _has_timm(name: str) -> bool:
    """Whether timm is installed and has a network of this name."""
    try:
        timm = importlib.import_module("timm")
    except ImportError:
        return False
    return bool(timm.is_model(name))


def _is_of_timm(folder: str) -> bool:
    """Whether a folder has a network that timm wrote; transformers does not load all of them."""
    file = Path(folder, "config.json")
    try:
        return "pretrained_cfg" in json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _task_of(folder: str) -> str:
    """Return the task for which a model was trained, by its configuration."""
    with errors_as(ParamError, f"Param pretrained is {folder!r}, whose config.json cannot be read"):
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        names = config.get("architectures") or []
    is_of_images = Path(folder, "preprocessor_config.json").is_file() and "vocab_size" not in config
    for end, task in _TASKS_OF_CLASSES.items():
        if any(str(name).endswith(end) for name in names):
            return IMAGE_EMBEDDINGS if task == _EMBEDDINGS and is_of_images else task
    what = f"was trained as {', '.join(map(str, names))}" if names else "does not say what it was trained for"
    raise ParamError(
        f"Param pretrained is {folder!r}, which {what}. Set task to one of {', '.join(map(repr, TASKS))}."
    )


def _load_texts(source: Source, column: str, max_length: int) -> TrainedModel:
    is_embedding = source.task == _EMBEDDINGS
    tokenizer, model, loading = load_parts(
        source.name, "AutoModel" if is_embedding else "AutoModelForSequenceClassification"
    )
    _check_trained(loading, source, is_embedding=is_embedding)
    network = (TextEmbedding if is_embedding else PretrainedTextNetwork)(model, taken_names(tokenizer))
    kind, labels = ("value", None) if is_embedding else _classes_of(model.config)
    inputs = fitting_inputs(source.name, tokenizer, network, column=column, wanted=max_length)
    return TrainedModel(network=network, prepare=inputs, kind=kind, labels=labels)


def _load_images(source: Source, column: str) -> TrainedModel:
    is_embedding = source.task == IMAGE_EMBEDDINGS
    what = (
        f"Param pretrained is {source.name!r}, from which transformers loads no processor of images and no model for "
        f"{source.task!r}"
    )
    transformers = import_transformers("Param pretrained")
    with errors_as(ParamError, what):
        processor = transformers.AutoImageProcessor.from_pretrained(source.name, local_files_only=True)
        loader = transformers.AutoModel if is_embedding else transformers.AutoModelForImageClassification
        model, loading = loader.from_pretrained(source.name, local_files_only=True, output_loading_info=True)
    _check_trained(loading, source, is_embedding=is_embedding)
    network: nn.Module = model.float()
    if is_embedding:
        network = ImageEmbedding(network, has_pooler=not loading["missing_keys"])
    kind, labels = ("value", None) if is_embedding else _classes_of(model.config)
    inputs = TransformedImages(column=column, transform=ImageProcessor(processor))
    return TrainedModel(network=network, prepare=inputs, kind=kind, labels=labels)


@dataclass(frozen=True)
class ImageProcessor:
    """The transform of one image by a processor of transformers.

    Attributes:
        processor: the processor.
    """

    processor: Any

    def __call__(self, image: Any) -> Tensor:
        """Return the input of the network, ``(channels, height, width)``."""
        pixels: Tensor = self.processor(images=image, return_tensors="pt")["pixel_values"][0]
        return pixels


def tell_apart(labels: Sequence[str]) -> tuple[str, ...]:
    """Return labels of classes with the number of the class behind those that several classes have.

    Of ImageNet's classes two are called crane, the bird and the machine.
    """
    count = Counter(labels)
    return tuple(f"{label} ({number})" if count[label] > 1 else label for number, label in enumerate(labels))


def _classes_of(config: Any) -> tuple[PredictionKind, tuple[str, ...] | None]:
    """Return the meaning of a classifier's outputs, and the labels of its classes, from its configuration."""
    if config.num_labels == 1 or config.problem_type == "regression":
        return "value", None
    if config.problem_type == "multi_label_classification":
        return "binary_logit", None
    return "class", tell_apart([str(config.id2label[index]) for index in range(config.num_labels)])


def _check_trained(loading: Mapping[str, Any], source: Source, *, is_embedding: bool) -> None:
    """Check that a folder has all weights of a model; for embeddings, its pooler may be missing."""
    lacking = [name for name in names_lacking(loading) if not (is_embedding and name.startswith("pooler."))]
    if lacking:
        fit = "ImageClassifier" if source.task == IMAGES else "TextClassifier(pretrained=folder)"
        raise ParamError(
            f"Param pretrained is {source.name!r}, whose model was not trained for {source.task}: it has no weights "
            f"for {list_names(lacking, 3)}. Choose another task, or fit a {fit}."
        )
