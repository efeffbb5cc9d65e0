"""The ready-made estimator for images. Runs on the *driver*; the training runs on the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark import keyword_only
from pyspark.ml.classification import Classifier
from torch import nn

from sparkdl.errors import DataError, ParamError
from sparkdl.estimators.ready_made.image_params import HasBackbone, HasImages
from sparkdl.estimators.ready_made.images import (
    IMAGENET_SCALES,
    image_inputs,
    known_scales,
    learn_scales,
    learn_size,
)
from sparkdl.estimators.ready_made.models import TorchClassificationModel
from sparkdl.estimators.ready_made.params import _ReadyMadeClassifierParams, out_of_range
from sparkdl.estimators.ready_made.ready_made_estimator import MadeModel, ReadyMadeEstimator
from sparkdl.estimators.ready_made.shared_arguments import SharedArguments, with_shared_arguments
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
from sparkdl.networks.images import ImageAugmentation, ImageNetwork, ResidualNetwork
from sparkdl.networks.initial_weights import seeded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from typing_extensions import Unpack

    from sparkdl.data import ParquetDataset
    from sparkdl.data.dataset.rows import RowChoice
    from sparkdl.estimators.label_mixins import Labels
    from sparkdl.networks.images import ImageInputs

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
            ``"imagenet"``, or ``"none"``; default: those that the library tells of its pretrained weights where
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
