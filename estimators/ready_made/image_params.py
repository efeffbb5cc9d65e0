"""Params of the ready-made estimator for images: one small mixin for each group of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters

from sparkdl.estimators.param_mixins import P, one_of
from sparkdl.networks.images import AUGMENTATIONS, RESIZE_MODES

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
        "default: those that the library tells of its pretrained weights with these, else learned",
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

    def setImageSize(self: P, value: int | Sequence[int]) -> P:
        """Set height and width, or one number for both, to which images are brought."""
        return self._set(imageSize=value)

    def setResizeMode(self: P, value: str) -> P:
        """Set how images of other proportions are brought to that size."""
        return self._set(resizeMode=value)

    def setImageShape(self: P, value: Sequence[int]) -> P:
        """Set the shape of images that lie in flat arrays or vectors."""
        return self._set(imageShape=value)

    def setNormalization(self: P, value: str) -> P:
        """Set by what channels are normalized."""
        return self._set(normalization=value)

    def setAugmentation(self: P, value: Sequence[str]) -> P:
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

    def setBackbone(self: P, value: str) -> P:
        """Set the network."""
        return self._set(backbone=value)

    def setBackboneWeights(self: P, value: str) -> P:
        """Set with which weights it begins."""
        return self._set(backboneWeights=value)

    def setStageWidths(self: P, value: Sequence[int]) -> P:
        """Set the channels of each stage."""
        return self._set(stageWidths=value)

    def setBlocksPerStage(self: P, value: int) -> P:
        """Set how many blocks each stage has."""
        return self._set(blocksPerStage=value)
