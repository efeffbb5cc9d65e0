"""The ready-made estimator for images, and its Params.

The *driver* learns the layout of the images, one size for all of them, and the scales of their channels from the rows.
The training runs on the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from pyspark import keyword_only
from pyspark.ml.classification import Classifier
from pyspark.ml.param import Param, Params, TypeConverters
from torch import nn

from sparkdl.data import ParquetFeed
from sparkdl.errors import DataError, ParamError
from sparkdl.estimators.fit.recipe import Recipe
from sparkdl.estimators.params.base import OneOf, to_integers
from sparkdl.estimators.params.estimator import ClassArguments
from sparkdl.estimators.params.inputs import HasFeatureColumns
from sparkdl.estimators.params.table import at_least, check_of, optional, param, with_arguments
from sparkdl.estimators.ready_made.estimator import ReadyMadeEstimator, TorchClassificationModel
from sparkdl.estimators.ready_made.params import (
    HasAdapters,
    _ReadyMadeClassifierParams,
    check_one_column,
    check_unset,
    describe_kind,
)
from sparkdl.networks.adapters import with_adapters
from sparkdl.networks.backbones import (
    NO_WEIGHTS,
    OWN,
    PRETRAINED,
    check_backbone,
    last_layers,
    load_fitting,
    make_backbone,
    pretrained_scales,
    read_backbone_weights,
)
from sparkdl.networks.images import (
    AUGMENTATIONS,
    RESIZE_MODES,
    ImageAugmentation,
    ImageInputs,
    ImageNetwork,
    ResidualNetwork,
)
from sparkdl.networks.standardization import Moments
from sparkdl.random_state import seeded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession
    from typing_extensions import Unpack

    from sparkdl.data import Column, ParquetDataset
    from sparkdl.data.dataset.row_choice import RowChoice


NORMALIZATIONS = ("learned", "imagenet", "none")


def _to_size(value: Any) -> Any:
    """Convert one number of pixels (for a square), or height and width, to a list of height and width."""
    sides = [value, value] if isinstance(value, int) else TypeConverters.toListInt(value)
    if len(sides) != 2:
        raise TypeError(f"{value!r} is neither a number of pixels nor a height and a width")
    return sides


def _check_shape(param: Param[Any], value: Sequence[int]) -> None:
    at_least(1)(param, value)
    if len(value) not in (2, 3):
        raise ParamError(f"Param {param.name} has {len(value)} numbers, {value}: {param.doc}.")


def _check_widths(param: Param[Any], value: Sequence[int]) -> None:
    at_least(1)(param, value)
    if not value:
        raise ParamError(f"Param {param.name} is empty: {param.doc}.")


def _to_augmentations(value: Any) -> Sequence[str]:
    names = TypeConverters.toListString(value)
    unknown = [name for name in names if name not in AUGMENTATIONS]
    if unknown:
        raise TypeError(f"{unknown[0]!r} is none of {', '.join(map(repr, AUGMENTATIONS))}")
    return names


class HasImages(Params):
    """Params for the conversion of images to the inputs of a network."""

    imageSize, getImageSize, setImageSize = optional(
        _to_size,
        "height and width, or one number for both, to which images are resized (> 0); default: their median size",
        check=at_least(1),
        more="The median size is scaled down if its longer side is above 224.",
    )
    resizeMode, getResizeMode, setResizeMode = param(
        OneOf(*RESIZE_MODES),
        "how images with other proportions are resized: crop (only the middle part is kept) or stretch",
        default="crop",
    )
    imageShape, getImageShape, setImageShape = optional(
        to_integers,
        "height and width, or height, width and channels, of images in flat arrays or vectors (> 0); "
        "default: none",
        check=_check_shape,
    )
    normalization, getNormalization, setNormalization = optional(
        OneOf(*NORMALIZATIONS),
        "mean and standard deviation that normalize the channels: learned (from the rows), imagenet or none; default: "
        "those of the pretrained weights if backboneWeights is pretrained, else learned",
    )
    augmentation, getAugmentation, setAugmentation = param(
        _to_augmentations,
        "list of random changes of the images in training: flip (left to right) and crop (shift by up to an eighth of "
        "the sides)",
        default=[],
    )


class HasBackbone(Params):
    """Params for the network of an image classifier and its initial weights."""

    backbone, getBackbone, setBackbone = param(
        TypeConverters.toString,
        "network: residual (a small residual network of sparkdl), or the name of a network of an installed library, "
        "such as torchvision:resnet18 or timm:resnet18",
        default=OWN,
        more="The executors need the library as well.",
    )
    backboneWeights, getBackboneWeights, setBackboneWeights = param(
        TypeConverters.toString,
        "initial weights of the network: none (random weights), pretrained (weights that the library downloads), or "
        "the path of a file on the driver",
        default=NO_WEIGHTS,
        more="The file is a safetensors file, or a ``state_dict`` that ``torch.save`` wrote. Its last layer may be "
        "for other classes.",
    )
    stageWidths, getStageWidths, setStageWidths = param(
        to_integers,
        "number of channels in each stage of the residual network (> 0)",
        default=[32, 64, 128],
        check=_check_widths,
    )
    blocksPerStage, getBlocksPerStage, setBlocksPerStage = param(
        TypeConverters.toInt,
        "number of residual blocks, of two convolutions each, in each stage of the residual network (> 0)",
        default=2,
        check=at_least(1),
    )


LOOKED_AT = 512
"""Number of images from which size and scales are learned.

Decoding all images would take longer on the driver than the training takes on the ranks.
"""

LARGEST_LEARNED = 224
"""Longest side in pixels of a learned size, as of networks for ImageNet; users may set a larger size."""

_ROWS_AT_ONCE = 16
_PLAIN_CHANNELS = (1, 3, 4)

IMAGENET_SCALES = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of the channels of ImageNet, for pixels from 0 to 1."""


def image_inputs(
    column: Column, *, shape: Sequence[int] | None, size: Sequence[int] | None, resize_mode: str
) -> ImageInputs:
    """Return the conversion of a column of images to inputs.

    Args:
        column: column of images.
        shape: shape of images in flat arrays, as set by the user; None if it is not set.
        size: height and width to which images are resized; None for 1 x 1, in place of a size that is learned later.
        resize_mode: how images with other proportions are resized, ``"crop"`` or ``"stretch"``.

    Raises:
        DataError: if the column does not hold images, or holds arrays whose shape is unknown or not that of images.
    """
    height, width = size or (1, 1)
    inputs = ImageInputs(column=column.name, kind=column.kind, size=(height, width), resize_mode=resize_mode)
    if column.kind in ("binary", "image") and not column.shape:
        if shape is not None:
            raise DataError(
                f"Column {column.name!r} holds images that have their own shape. Leave imageShape out; imageSize is "
                "the size to which they are resized."
            )
        return inputs
    if fault := fault_of(column):
        raise DataError(fault)
    image_shape = _shape_of_arrays(column, shape)
    has_channels_first = (
        len(image_shape) == 3 and image_shape[2] not in _PLAIN_CHANNELS and image_shape[0] in _PLAIN_CHANNELS
    )
    return replace(inputs, shape=image_shape, has_channels_first=has_channels_first)


def fault_of(column: Column) -> str:
    """Return what is wrong with a column of images; empty if it can be used, as far as its type and shape say."""
    if (column.kind == "number" and column.shape) or (
        column.kind in ("binary", "image") and not column.shape
    ):
        return ""
    return (
        f"Column {column.name!r} holds {describe_kind(column)}, and ImageClassifier takes images of Spark's image "
        "source, encoded ones (binary), or arrays of one shape."
    )


def _shape_of_arrays(column: Column, shape: Sequence[int] | None) -> tuple[int, ...]:
    if len(column.shape) in (2, 3):
        if shape is not None and tuple(shape) != column.shape:
            raise DataError(
                f"Column {column.name!r} holds arrays of {_by(column.shape)}, and Param imageShape is {list(shape)}. "
                "Leave imageShape out: it is for flat arrays."
            )
        return column.shape
    if len(column.shape) > 3:
        raise DataError(
            f"Column {column.name!r} holds arrays of {_by(column.shape)}, which are not images: an image has a height, "
            "a width and, optionally, channels."
        )
    if shape is None:
        side = math.isqrt(column.shape[0])
        example = [side, side] if side * side == column.shape[0] else [column.shape[0] // 8, 8]
        raise DataError(
            f"Column {column.name!r} holds flat arrays of {column.shape[0]} numbers. Set the shape of their images, "
            f"for instance imageShape={example}."
        )
    if math.prod(shape) != column.shape[0]:
        raise DataError(
            f"Param imageShape is {list(shape)}, which are {math.prod(shape)} numbers, and the arrays in column "
            f"{column.name!r} have {column.shape[0]}."
        )
    return tuple(shape)


def learn_size(inputs: ImageInputs, dataset: ParquetDataset, training: RowChoice | None) -> tuple[int, int]:
    """Return the median height and width of some images, scaled down to at most :data:`LARGEST_LEARNED`.

    Raises:
        DataError: if an image cannot be read.
    """
    if inputs.kind == "number":
        sizes = [inputs.size_of_arrays]
    else:
        sizes = [size for batch in _some(inputs.column, dataset, training) for size in inputs.sizes(batch)]
    height, width = np.median(np.array(sizes), axis=0)
    scale = min(1.0, LARGEST_LEARNED / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def learn_scales(
    inputs: ImageInputs, dataset: ParquetDataset, training: RowChoice | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return mean and standard deviation of each channel over some images, as the network gets them.

    Raises:
        DataError: if an image cannot be read.
    """
    moments = Moments()
    for batch in _some(inputs.column, dataset, training):
        images = inputs(batch)
        moments.add(np.moveaxis(images, 1, -1).reshape(-1, inputs.num_channels))
    return moments.mean, moments.deviation


def known_scales(
    inputs: ImageInputs,
    dataset: ParquetDataset,
    training: RowChoice | None,
    scales: tuple[Sequence[float], Sequence[float]],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return mean and standard deviation of each channel in the unit of the images.

    The unit is 0 to 255, or 0 to 1 for arrays of fractions.

    Args:
        inputs: conversion of the column.
        dataset: dataset of all rows.
        training: training rows; None for all rows.
        scales: mean and standard deviation of 3 channels, for pixels from 0 to 1.

    Raises:
        DataError: if the number of channels of the images is not 1 or 3.
    """
    if inputs.num_channels not in (1, 3):
        raise DataError(
            f"Param normalization is 'imagenet', which has 3 channels, and the images in column {inputs.column!r} have "
            f"{inputs.num_channels}. Take 'learned'."
        )
    mean, deviation = (np.array(scale, np.float64) for scale in scales)
    if inputs.num_channels == 1:
        mean, deviation = mean.mean(keepdims=True), deviation.mean(keepdims=True)
    is_float = inputs.kind == "number" and "float" in dataset.column(inputs.column).dtype
    if is_float and max(float(inputs(batch).max()) for batch in _some(inputs.column, dataset, training)) <= 1:
        return mean, deviation
    return mean * 255, deviation * 255


def _some(
    name: str, dataset: ParquetDataset, training: RowChoice | None
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield batches of some rows, from row groups in a random order, as files may be sorted by class.

    The order is the same every time.
    """
    with (
        ParquetFeed(
            dataset, columns=[name], batch_size=_ROWS_AT_ONCE, shuffle=True, seed=0, row_filter=training
        ) as feed,
        closing(feed.epoch(0)) as batches,
    ):
        for _, batch in zip(range(LOOKED_AT // _ROWS_AT_ONCE), batches, strict=False):
            yield batch


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


@with_arguments
class ImageClassifier(
    ReadyMadeEstimator[TorchClassificationModel],
    HasImages,
    HasBackbone,
    HasAdapters,
    _ReadyMadeClassifierParams,
    Classifier[TorchClassificationModel],
):
    """Classifies images with a small residual network, or a network of torchvision or timm.

    Example::

        images = spark.read.format("binaryFile").load("photos/*/*.jpg")
        labelled = images.withColumn("kind", F.element_at(F.split("path", "/"), -2))
        model = ImageClassifier(featuresCol="content", labelCol="kind", numWorkers=4).fit(labelled)

    The column holds images of Spark's ``image`` source; encoded images, which Pillow decodes on the ranks; or arrays of
    one shape. An array has height and width, optionally followed by channels. Channels come first if only the first
    dimension can be the channels. Encoded images and images of Spark's source are converted to red, green and blue;
    arrays keep their channels. ``fit`` decodes up to 512 training images on the driver to learn their size and the
    scales of their channels, and reads all labels to count and check the classes. It returns a
    :class:`TorchClassificationModel`. An image that cannot be decoded is an error.
    """

    featuresCol = HasFeatureColumns.featuresCol.reword("column of images")
    _model_class = TorchClassificationModel
    _own_defaults: ClassVar[Mapping[str, Any]] = {"predictionBatchSize": ImageInputs.rows_at_once}

    @keyword_only
    def __init__(
        self,
        *,
        featuresCol: str | None = None,
        labelCol: str | None = None,
        imageSize: int | Sequence[int] | None = None,
        resizeMode: str | None = None,
        imageShape: Sequence[int] | None = None,
        normalization: str | None = None,
        augmentation: Sequence[str] | None = None,
        backbone: str | None = None,
        backboneWeights: str | None = None,
        loraRank: int | None = None,
        stageWidths: Sequence[int] | None = None,
        blocksPerStage: int | None = None,
        dropout: float | None = None,
        learningRate: float | None = None,
        weightDecay: float | None = None,
        **params: Unpack[ClassArguments],
    ) -> None:
        super().__init__()
        self._set_arguments()

    def _check_values(self) -> None:
        """Check all Params, as far as that needs no data.

        Raises:
            ParamError: if a value cannot work; the message names the Param, its value and what it may be.
        """
        super()._check_values()
        check_one_column(self, "images")
        self._check_backbone()

    def _check_backbone(self) -> None:
        name, weights = self.getBackbone(), self.getBackboneWeights()
        with check_of("backbone"):
            check_backbone(name)
        if weights == NO_WEIGHTS:
            check_unset(
                self,
                [self.loraRank],
                "backboneWeights",
                "backboneWeights is 'none': adapters are for trained weights",
            )
        if name == OWN and weights == PRETRAINED:
            raise ParamError(
                "Param backboneWeights is 'pretrained', and the residual network has no such weights. Take a backbone "
                "such as 'torchvision:resnet18', or the path of a file."
            ).about("backboneWeights", "backbone")
        if name != OWN:
            of_network: list[Param[Any]] = [self.stageWidths, self.blocksPerStage, self.dropout]
            check_unset(
                self, of_network, "backbone", f"the network of Param backbone, {name!r}, brings its own"
            )
        if weights not in (NO_WEIGHTS, PRETRAINED):
            with check_of("backboneWeights"):
                read_backbone_weights(weights)

    def _feature_fault(self, column: Column) -> str:
        """Return what is wrong with the type of the feature column; see :func:`fault_of`."""
        return fault_of(column)

    def _make(
        self, dataset: ParquetDataset, training: RowChoice | None, spark: SparkSession | None = None
    ) -> Recipe:
        """Make the network for rows; see :class:`ReadyMadeEstimator`."""
        (name,) = self.getFeaturesCols()
        inputs = image_inputs(
            dataset.column(name),
            shape=self.getImageShape(),
            size=self.getImageSize(),
            resize_mode=self.getResizeMode(),
        )
        if self.getImageSize() is None:
            inputs = replace(inputs, size=learn_size(inputs, dataset, training))
        num_classes = self._count_classes(dataset)
        if self.getBackbone() != OWN and inputs.num_channels not in (1, 3):
            raise DataError(
                f"Param backbone is {self.getBackbone()!r}, which takes images with 1 or 3 channels, and the images in "
                f"column {name!r} have {inputs.num_channels}. Set backbone={OWN!r}, or keep 1 or 3 of the channels."
            )
        mean, deviation = self._scales(inputs, dataset, training)
        with seeded(self.getSeed()):
            backbone, rank = self._backbone(inputs, num_classes), self.getLoraRank()
            if rank is not None:
                trained = last_layers(backbone, num_classes)
                if not trained:
                    raise ParamError(
                        "Param loraRank is set, and the model has no last layer with an output per class, which would "
                        "be trained as a whole. Leave loraRank out."
                    ).about("loraRank")
                backbone = with_adapters(backbone, rank, trained=trained)
            network = ImageNetwork(
                mean=mean,
                deviation=deviation,
                backbone=backbone,
                takes_colours=self.getBackbone() != OWN,
            )
        done = self.getAugmentation()
        augment = ImageAugmentation(column=name, flips="flip" in done, crops="crop" in done) if done else None
        return Recipe(network, inputs, nn.CrossEntropyLoss(), augment, num_classes=num_classes)

    def _scales(self, inputs: ImageInputs, dataset: ParquetDataset, training: RowChoice | None) -> Any:
        chosen = self.getNormalization()
        if chosen == "none":
            return np.zeros(inputs.num_channels), np.ones(inputs.num_channels)
        if chosen == "imagenet":
            return known_scales(inputs, dataset, training, IMAGENET_SCALES)
        if chosen is None and self.getBackboneWeights() == PRETRAINED:
            return known_scales(inputs, dataset, training, pretrained_scales(self.getBackbone()))
        return learn_scales(inputs, dataset, training)

    def _backbone(self, inputs: ImageInputs, num_classes: int) -> nn.Module:
        name, weights = self.getBackbone(), self.getBackboneWeights()
        if name != OWN:
            return make_backbone(name, num_outputs=num_classes, weights=weights)
        network = ResidualNetwork(
            num_channels=inputs.num_channels,
            size=inputs.size,
            stage_widths=self.getStageWidths(),
            blocks_per_stage=self.getBlocksPerStage(),
            dropout=self.getDropout(),
            num_outputs=num_classes,
        )
        if weights != NO_WEIGHTS:
            load_fitting(network, read_backbone_weights(weights), num_outputs=num_classes, path=weights)
        return network

    def _path_of_pretrained(self) -> str | None:
        """Return the path of the file of weights, or None."""
        weights = self.getBackboneWeights()
        return None if weights in (NO_WEIGHTS, PRETRAINED) else weights
