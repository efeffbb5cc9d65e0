"""The ready-made estimator for images, its Params, and what it learns from a column of images.

There is one small mixin for each group of Params. Learned are the layout of the images, one size for all of them, and
scales. The training runs on the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pyspark import keyword_only
from pyspark.ml.classification import Classifier
from pyspark.ml.param import Param, Params, TypeConverters
from torch import nn

from sparkdl.data import ParquetFeed
from sparkdl.errors import DataError, ParamError
from sparkdl.estimators.params.base import ParamsT, one_of
from sparkdl.estimators.ready_made.estimator import MadeModel, ReadyMadeEstimator, TorchClassificationModel
from sparkdl.estimators.ready_made.params import (
    SharedArguments,
    _ReadyMadeClassifierParams,
    out_of_range,
    with_shared_arguments,
)
from sparkdl.networks.backbones import (
    NO_WEIGHTS,
    OWN,
    PRETRAINED,
    check_backbone,
    load_fitting,
    make_backbone,
    pretrained_scales,
    read_weights,
)
from sparkdl.networks.images import (
    AUGMENTATIONS,
    RESIZE_MODES,
    ImageAugmentation,
    ImageInputs,
    ImageNetwork,
    ResidualNetwork,
)
from sparkdl.networks.initial_weights import seeded
from sparkdl.networks.standardization import Moments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession
    from typing_extensions import Unpack

    from sparkdl.data import Column, ParquetDataset
    from sparkdl.data.dataset.rows import RowChoice
    from sparkdl.estimators.params.inputs import Labels


NORMALIZATIONS = ("learned", "imagenet", "none")


def _to_size(value: Any) -> list[int]:
    """Convert one number, for a square, or height and width, to these two."""
    sides = [value, value] if isinstance(value, int) else TypeConverters.toListInt(value)
    if len(sides) != 2:
        raise TypeError(f"{value!r} is neither a number of pixels nor a height and a width")
    return sides


def _to_augmentations(value: Any) -> list[str]:
    names = TypeConverters.toListString(value)
    unknown = [name for name in names if name not in AUGMENTATIONS]
    if unknown:
        raise TypeError(f"{unknown[0]!r} is none of {', '.join(map(repr, AUGMENTATIONS))}")
    return names


class HasImages(Params):
    """Params ``imageSize``, ``resizeMode``, ``imageShape``, ``normalization`` and ``augmentation``."""

    imageSize: Param[Any] = Param(
        Params._dummy(),
        "imageSize",
        "height and width, or one number for both, to which images are brought (> 0); default: learned from the rows",
        _to_size,
    )
    resizeMode: Param[str] = Param(
        Params._dummy(),
        "resizeMode",
        "how images of other proportions are brought to imageSize: crop (the middle is kept) or stretch",
        one_of(*RESIZE_MODES),
    )
    imageShape: Param[list[int]] = Param(
        Params._dummy(),
        "imageShape",
        "height and width, or height, width and channels, of images that lie in flat arrays or vectors (> 0)",
        TypeConverters.toListInt,
    )
    normalization: Param[str] = Param(
        Params._dummy(),
        "normalization",
        "by which mean and deviation channels are normalized: learned from the rows, those of imagenet, or none; "
        "default: those that the library gives for its pretrained weights with these, else learned",
        one_of(*NORMALIZATIONS),
    )
    augmentation: Param[list[str]] = Param(
        Params._dummy(),
        "augmentation",
        "how images are changed at random in training: a list of flip (left to right) and crop (moved by up to an "
        "eighth)",
        _to_augmentations,
    )

    def getImageSize(self) -> list[int] | None:
        """Return height and width to which images are brought, where that was set."""
        return self.getOrDefault(self.imageSize) if self.isSet(self.imageSize) else None

    def getResizeMode(self) -> str:
        """Return ``"crop"`` or ``"stretch"``."""
        return self.getOrDefault(self.resizeMode)

    def getImageShape(self) -> list[int] | None:
        """Return the shape of images in flat arrays, where that was set."""
        return self.getOrDefault(self.imageShape) if self.isSet(self.imageShape) else None

    def getNormalization(self) -> str | None:
        """Return ``"learned"``, ``"imagenet"`` or ``"none"``, where that was set."""
        return self.getOrDefault(self.normalization) if self.isSet(self.normalization) else None

    def getAugmentation(self) -> list[str]:
        """Return how images are changed at random in training."""
        return self.getOrDefault(self.augmentation)

    def setImageSize(self: ParamsT, value: int | Sequence[int]) -> ParamsT:
        """Set height and width, or one number for both, to which images are brought."""
        return self._set(imageSize=value)

    def setResizeMode(self: ParamsT, value: str) -> ParamsT:
        """Set how images of other proportions are brought to that size."""
        return self._set(resizeMode=value)

    def setImageShape(self: ParamsT, value: Sequence[int]) -> ParamsT:
        """Set the shape of images that lie in flat arrays or vectors."""
        return self._set(imageShape=value)

    def setNormalization(self: ParamsT, value: str) -> ParamsT:
        """Set by what channels are normalized."""
        return self._set(normalization=value)

    def setAugmentation(self: ParamsT, value: Sequence[str]) -> ParamsT:
        """Set how images are changed at random in training."""
        return self._set(augmentation=value)


class HasBackbone(Params):
    """Params ``backbone``, ``backboneWeights``, ``stageWidths`` and ``blocksPerStage``."""

    backbone: Param[str] = Param(
        Params._dummy(),
        "backbone",
        "the network: residual, a small one of sparkdl, or one by its name in a library that is installed, as "
        "torchvision:resnet18 or timm:resnet18",
        TypeConverters.toString,
    )
    backboneWeights: Param[str] = Param(
        Params._dummy(),
        "backboneWeights",
        "with which weights it begins: none but random ones, pretrained for those that the library fetches from the "
        "network, or the path of a file on the driver",
        TypeConverters.toString,
    )
    stageWidths: Param[list[int]] = Param(
        Params._dummy(),
        "stageWidths",
        "channels of each stage of the residual network (> 0)",
        TypeConverters.toListInt,
    )
    blocksPerStage: Param[int] = Param(
        Params._dummy(),
        "blocksPerStage",
        "residual blocks of each stage of the residual network (> 0)",
        TypeConverters.toInt,
    )

    def getBackbone(self) -> str:
        """Return the name of the network."""
        return self.getOrDefault(self.backbone)

    def getBackboneWeights(self) -> str:
        """Return ``"none"``, ``"pretrained"`` or the path of a file."""
        return self.getOrDefault(self.backboneWeights)

    def getStageWidths(self) -> list[int]:
        """Return the channels of each stage."""
        return self.getOrDefault(self.stageWidths)

    def getBlocksPerStage(self) -> int:
        """Return how many blocks each stage has."""
        return self.getOrDefault(self.blocksPerStage)

    def setBackbone(self: ParamsT, value: str) -> ParamsT:
        """Set the network."""
        return self._set(backbone=value)

    def setBackboneWeights(self: ParamsT, value: str) -> ParamsT:
        """Set with which weights it begins."""
        return self._set(backboneWeights=value)

    def setStageWidths(self: ParamsT, value: Sequence[int]) -> ParamsT:
        """Set the channels of each stage."""
        return self._set(stageWidths=value)

    def setBlocksPerStage(self: ParamsT, value: int) -> ParamsT:
        """Set how many blocks each stage has."""
        return self._set(blocksPerStage=value)


LOOKED_AT = 512
"""Images of which size and scales are learned; to decode all would take the driver longer than the ranks train."""

LARGEST_LEARNED = 224
"""Pixels a side: what networks for ImageNet take; more are a choice that the user makes."""

_ROWS_AT_ONCE = 16
_PLAIN_CHANNELS = (1, 3, 4)

IMAGENET_SCALES = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and deviation of its channels, of pixels from 0 to 1."""


def image_inputs(
    column: Column, *, shape: Sequence[int] | None, size: Sequence[int] | None, resize_mode: str
) -> ImageInputs:
    """Return what makes inputs of a column.

    Args:
        column: of images.
        shape: of those in flat arrays, as the user gave it.
        size: to bring them to; None leaves it at 1 x 1, to be learned.
        resize_mode: how.

    Raises:
        DataError: if the column holds no images, or arrays whose shape is none of images or not known.
    """
    height, width = size or (1, 1)
    inputs = ImageInputs(column=column.name, kind=column.kind, size=(height, width), resize_mode=resize_mode)
    if column.kind in ("binary", "image") and not column.shape:
        if shape is not None:
            raise DataError(
                f"Column {column.name!r} holds images that tell their own shape. Leave imageShape out; imageSize says "
                "to what they are brought."
            )
        return inputs
    if column.kind != "number" or not column.shape:
        what = "arrays that differ in length" if column.kind == "ragged" else f"{column.kind} values"
        raise DataError(
            f"Column {column.name!r} holds {what}, and ImageClassifier takes images of Spark's image source, encoded "
            "ones (binary), or arrays of one shape."
        )
    found = _shape_of_arrays(column, shape)
    has_channels_first = len(found) == 3 and found[2] not in _PLAIN_CHANNELS and found[0] in _PLAIN_CHANNELS
    return replace(inputs, shape=found, has_channels_first=has_channels_first)


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
            f"Column {column.name!r} holds arrays of {_by(column.shape)}, which are no images: those have a height, a "
            "width, and channels where there are several."
        )
    if shape is None:
        side = math.isqrt(column.shape[0])
        example = [side, side] if side * side == column.shape[0] else [column.shape[0] // 8, 8]
        raise DataError(
            f"Column {column.name!r} holds flat arrays of {column.shape[0]} numbers. Say of which shape their images "
            f"are, for instance imageShape={example}."
        )
    if math.prod(shape) != column.shape[0]:
        raise DataError(
            f"Param imageShape is {list(shape)}, which are {math.prod(shape)} numbers, and the arrays in column "
            f"{column.name!r} have {column.shape[0]}."
        )
    return tuple(shape)


def learn_size(inputs: ImageInputs, dataset: ParquetDataset, training: RowChoice | None) -> tuple[int, int]:
    """Return the median height and width of some images, no side longer than :data:`LARGEST_LEARNED`.

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
    """Return mean and deviation of each channel over some images, as they go into the network.

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
    """Return mean and deviation in the unit of the images: 0 to 255, or 0 to 1 where arrays hold fractions.

    Args:
        inputs: of the column.
        dataset: of the rows.
        training: which of them are trained on.
        scales: mean and deviation of 3 channels, of pixels from 0 to 1.

    Raises:
        DataError: if the images have another number of channels than 1 or 3.
    """
    if inputs.num_channels not in (1, 3):
        raise DataError(
            f"Param normalization is 'imagenet', which has 3 channels, and the images in column {inputs.column!r} have "
            f"{inputs.num_channels}. Take 'learned'."
        )
    mean, deviation = (np.array(each, np.float64) for each in scales)
    if inputs.num_channels == 1:
        mean, deviation = mean.mean(keepdims=True), deviation.mean(keepdims=True)
    is_float = inputs.kind == "number" and "float" in dataset.column(inputs.column).dtype
    if is_float and max(float(inputs(batch).max()) for batch in _some(inputs.column, dataset, training)) <= 1:
        return mean, deviation
    return mean * 255, deviation * 255


def _some(
    name: str, dataset: ParquetDataset, training: RowChoice | None
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Some rows, of row groups in a random order that is the same every time, as files may be sorted by class."""
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


IMAGE_DEFAULTS: dict[str, Any] = {
    "resizeMode": "crop",
    "augmentation": [],
    "backbone": OWN,
    "backboneWeights": NO_WEIGHTS,
    "stageWidths": [32, 64, 128],
    "blocksPerStage": 2,
    "dropout": 0.1,
    "predictionBatchSize": 64,
}


@partial(with_shared_arguments, predictionBatchSize="rows per forward pass of ``transform``; default 64.")
class ImageClassifier(
    ReadyMadeEstimator[TorchClassificationModel],
    HasImages,
    HasBackbone,
    _ReadyMadeClassifierParams,
    Classifier[TorchClassificationModel],
):
    """Tells classes by images, with a small residual network or one of torchvision or timm.

    Images are those of Spark's ``image`` source; encoded ones, which Pillow decodes on the ranks; or arrays of one
    shape, of height and width, and channels after them or, where only they can be channels, before. Encoded images
    and those of Spark become red, green and blue, arrays keep their channels. ``fit`` decodes up to 512 images of the
    training rows on the driver to learn their size and the scale of their channels, and reads all labels to count
    and check the classes; it returns a :class:`TorchClassificationModel`. An image that cannot be decoded is an error.

    Args:
        featuresCol: column of images; default ``"features"``.
        labelCol: column of classes: whole numbers from 0, as Spark ML has them, or strings, booleans or other integers,
            which are predicted as they are called; default ``"label"``.
        labels: what it calls the classes, in the order that they are to have, where rows may lack one, as in a fold of
            ``CrossValidator``, or need not be read to find them; default: those that the rows hold.
        imageSize: height and width, or one number for both, to which images are brought; default: their median, where
            a side is longer made smaller to 224.
        resizeMode: how images of other proportions are: ``"crop"`` (default) keeps their middle, ``"stretch"`` all.
        imageShape: height and width, or height, width and channels, of images in flat arrays or vectors.
        normalization: by which mean and deviation channels are normalized: ``"learned"`` from the rows, those of
            ``"imagenet"``, or ``"none"``; default: those that the library gives for its pretrained weights where
            ``backboneWeights="pretrained"``, else ``"learned"``.
        augmentation: how images are changed at random in training: a list of ``"flip"``, left to right, and ``"crop"``,
            moved by up to an eighth of their sides; default [].
        backbone: ``"residual"`` (default), or a network by its name in a library that is installed, as
            ``"torchvision:resnet18"`` and ``"timm:resnet18"``; executors need the library as well.
        backboneWeights: with which weights it begins: ``"none"`` (default) but random ones, ``"pretrained"`` for those
            that the library fetches from the network, or the path of a file on the driver: of safetensors, or a
            ``state_dict`` of ``torch.save``. The last layer may be for other classes.
        stageWidths: channels of each stage of the residual network; default [32, 64, 128].
        blocksPerStage: its blocks of two convolutions in each stage; default 2.
        dropout: share of its last features that is dropped in training; default 0.1.
        learningRate: of AdamW; default 0.001.
        weightDecay: of AdamW; default 0.0001.
        batchSize: rows per rank and step; default 64.
        epochs: how often every row is visited; default 20.
        seed: of the first weights, the order of rows and of all random numbers during the fit; default 0.
        probabilityCol: column of the probabilities of the classes, a vector; default ``"probability"``.
        rawPredictionCol: column of their scores, a vector; default ``"rawPrediction"``.
        predictionType: type of predictionCol: ``"auto"`` (default), ``"double"`` or ``"long"`` for the number of the
            class where labels are strings, ``"array"`` or ``"vector"``.
    """

    @keyword_only
    def __init__(
        self,
        *,
        featuresCol: str | None = None,
        labelCol: str | None = None,
        labels: Labels | None = None,
        imageSize: int | Sequence[int] | None = None,
        resizeMode: str | None = None,
        imageShape: Sequence[int] | None = None,
        normalization: str | None = None,
        augmentation: Sequence[str] | None = None,
        backbone: str | None = None,
        backboneWeights: str | None = None,
        stageWidths: Sequence[int] | None = None,
        blocksPerStage: int | None = None,
        dropout: float | None = None,
        learningRate: float | None = None,
        weightDecay: float | None = None,
        batchSize: int | None = None,
        epochs: int | None = None,
        seed: int | None = None,
        probabilityCol: str | None = None,
        rawPredictionCol: str | None = None,
        predictionType: str | None = None,
        **shared: Unpack[SharedArguments],
    ) -> None:
        super().__init__()
        self._setDefault(**IMAGE_DEFAULTS)
        self._set_arguments()

    def check_ranges(self) -> None:
        """Check what needs no data; see :meth:`check_values`."""
        super().check_ranges()
        if len(self.getFeaturesCols()) > 1:
            raise ParamError(
                f"Param featuresCol is {self.getFeaturesCols()}, and ImageClassifier takes one column of images."
            )
        sides = {
            self.imageSize: self.getImageSize() or [1],
            self.imageShape: self.getImageShape() or [1],
            self.stageWidths: self.getStageWidths() or [0],
            self.blocksPerStage: [self.getBlocksPerStage()],
        }
        for param, values in sides.items():
            if min(values) < 1:
                raise out_of_range(self, param)
        if len(self.getImageShape() or [1, 1]) not in (2, 3):
            raise out_of_range(self, self.imageShape)
        self._check_backbone()

    def _check_backbone(self) -> None:
        name, weights = self.getBackbone(), self.getBackboneWeights()
        check_backbone(name)
        if name == OWN and weights == PRETRAINED:
            raise ParamError(
                "Param backboneWeights is 'pretrained', and the residual network has no such weights. Take a backbone "
                "such as 'torchvision:resnet18', or the path of a file."
            )
        for param in (self.stageWidths, self.blocksPerStage, self.dropout):
            if name != OWN and self.isSet(param):
                raise ParamError(
                    f"Param {param.name} is {self.getOrDefault(param)}, which is one of the residual network, and "
                    f"Param backbone is {name!r}. Leave {param.name} out."
                )
        if weights not in (NO_WEIGHTS, PRETRAINED):
            read_weights(weights)

    def make(
        self, dataset: ParquetDataset, training: RowChoice | None, spark: SparkSession | None = None
    ) -> MadeModel:
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
        self._check_channels(inputs)
        mean, deviation = self._scales(inputs, dataset, training)
        with seeded(self.getSeed()):
            network = ImageNetwork(
                mean=mean,
                deviation=deviation,
                backbone=self._backbone(inputs, num_classes),
                takes_colours=self.getBackbone() != OWN,
            )
        done = self.getAugmentation()
        augment = ImageAugmentation(column=name, flips="flip" in done, crops="crop" in done) if done else None
        return MadeModel(network, inputs, nn.CrossEntropyLoss(), augment)

    def _scales(self, inputs: ImageInputs, dataset: ParquetDataset, training: RowChoice | None) -> Any:
        chosen = self.getNormalization()
        if chosen == "none":
            return np.zeros(inputs.num_channels), np.ones(inputs.num_channels)
        if chosen == "imagenet":
            return known_scales(inputs, dataset, training, IMAGENET_SCALES)
        if chosen is None and self.getBackboneWeights() == PRETRAINED:
            return known_scales(inputs, dataset, training, pretrained_scales(self.getBackbone()))
        return learn_scales(inputs, dataset, training)

    def _check_channels(self, inputs: ImageInputs) -> None:
        name = self.getBackbone()
        if name != OWN and inputs.num_channels not in (1, 3):
            raise DataError(
                f"Param backbone is {name!r}, which takes 3 channels, and the images in column {inputs.column!r} "
                f"have {inputs.num_channels}. Take backbone={OWN!r}, or leave channels out."
            )

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
            load_fitting(network, read_weights(weights), num_outputs=num_classes, path=weights)
        return network

    def model_class(self) -> type[TorchClassificationModel]:
        """Return the class of the models that fits return."""
        return TorchClassificationModel
