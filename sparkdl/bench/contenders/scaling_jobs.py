"""The jobs of ``sparkdl bench scaling``: a network, rows that it can learn, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.bench.contenders.parallel import DecoderSize, make_decoder
from sparkdl.errors import DataError

if TYPE_CHECKING:
    import torch

Batch = tuple["torch.Tensor", "torch.Tensor"]
"""Inputs and labels of some rows."""

_CLASSES = 10
_SHAPE = (3, 32, 32)
FILES, HELD_OUT_FILES = "data_batch_*.bin", "test_batch.bin"
"""Names of CIFAR-10's files, as patterns."""

_CIFAR_ROW_BYTES = 1 + 3 * 32 * 32
_NOISE = 2.0
"""Standard deviation of the noise on made images, whose classes differ by as much as one."""

GPT = DecoderSize(width=512, num_layers=6, num_heads=8, vocabulary=4096)
WIDE_GPT = DecoderSize(width=768, num_layers=4, num_heads=12, vocabulary=8192)
POSITIONS = 64
"""Tokens of a row of ``gpt`` and ``wide-gpt``."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained.

    Attributes:
        make_model: makes the network.
        draw: draws so many rows by a generator, from a folder's files if it is named; the last argument says whether
            they are held out.
        batch: number of rows of a step, if the user chooses none.
        epoch: number of rows of an epoch.
        make_optimizer: makes the optimizer of parameters.
        can_be_divided: whether other strategies than ``data`` and ``shard`` can train it.
    """

    make_model: Callable[[], torch.nn.Module]
    draw: Callable[[int, torch.Generator, str, bool], Batch]
    batch: int
    epoch: int
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    can_be_divided: bool = False


def _cnn() -> torch.nn.Module:
    """Make the network of CIFAR-10 tutorials: two convolutions, and a hidden layer of 128 units."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 128),
        nn.ReLU(),
        nn.Linear(128, _CLASSES),
    )


def _resnet() -> torch.nn.Module:
    """Make a ResNet of 18 layers for images of 32 x 32 (He et al. 2016), with groups instead of batches normalized.

    With GroupNorm the loss does not depend on how rows are shared among ranks, so that losses can be compared.
    """
    from torch import nn

    class Block(nn.Module):
        def __init__(self, before: int, width: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(before, width, 3, stride, 1, bias=False),
                nn.GroupNorm(8, width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, 1, 1, bias=False),
                nn.GroupNorm(8, width),
            )
            is_same = before == width and stride == 1
            self.past: nn.Module = (
                nn.Identity() if is_same else nn.Conv2d(before, width, 1, stride, bias=False)
            )

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return nn.functional.relu(self.body(images) + self.past(images))

    widths = [64, 64, 128, 256, 512]
    blocks = []
    for number, (before, width) in enumerate(pairwise(widths)):
        blocks += [Block(before, width, 1 if number == 0 else 2), Block(width, width, 1)]
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.GroupNorm(8, 64),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, _CLASSES),
    )


def _draw_images(rows: int, generator: torch.Generator, folder: str, is_held_out: bool) -> Batch:
    import torch

    if folder:
        images, labels = _cifar(folder, HELD_OUT_FILES if is_held_out else FILES)
        chosen = torch.randint(len(labels), (rows,), generator=generator)
        return images[chosen], labels[chosen]
    patterns = torch.randn((_CLASSES, *_SHAPE), generator=torch.Generator().manual_seed(1))
    labels = torch.randint(_CLASSES, (rows,), generator=generator)
    return patterns[labels] + _NOISE * torch.randn((rows, *_SHAPE), generator=generator), labels


_read: dict[tuple[str, str], Batch] = {}


def files_of_cifar(folder: str, pattern: str) -> list[Path]:
    """Return the files of CIFAR-10 in its binary version.

    Raises:
        DataError: if the folder has none.
    """
    files = sorted(Path(folder).glob(pattern))
    if not files:
        raise DataError(
            f"{folder} has no files {pattern}. CIFAR-10 has several versions: unpack the binary one, "
            "cifar-10-binary.tar.gz, and name its folder."
        )
    return files


def _cifar(folder: str, pattern: str) -> Batch:
    """Read images of CIFAR-10 in its binary version, once per process.

    Returns:
        Images of float32 (rows, 3, 32, 32) with mean 0 and standard deviation 1, and labels of int64.

    Raises:
        DataError: if the files are not there, or are damaged.
    """
    import numpy as np
    import torch

    if (folder, pattern) not in _read:
        content = np.concatenate([np.fromfile(file, np.uint8) for file in files_of_cifar(folder, pattern)])
        if content.size % _CIFAR_ROW_BYTES:
            raise DataError(
                f"The files {pattern} in {folder} have {content.size} bytes, which is not a multiple of "
                f"{_CIFAR_ROW_BYTES}, the bytes of an image: unpack them again."
            )
        rows = content.reshape(-1, _CIFAR_ROW_BYTES)
        images = torch.from_numpy(rows[:, 1:].reshape(-1, *_SHAPE).astype(np.float32))
        _read[folder, pattern] = (
            (images - images.mean()) / images.std(),
            torch.from_numpy(rows[:, 0].astype(np.int64)),
        )
    return _read[folder, pattern]


def _draw_tokens(rows: int, generator: torch.Generator, _: str, __: bool) -> Batch:
    """Draw sequences in which each token follows from the one before, but for one of two steps drawn at random."""
    import torch

    tokens = torch.empty((rows, POSITIONS + 1), dtype=torch.int64)
    tokens[:, 0] = torch.randint(GPT.vocabulary, (rows,), generator=generator)
    steps = torch.randint(1, 3, (rows, POSITIONS), generator=generator)
    for position in range(POSITIONS):
        tokens[:, position + 1] = (5 * tokens[:, position] + steps[:, position]) % GPT.vocabulary
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _momentum(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def _decoder(name: str) -> torch.nn.Module:
    return make_decoder(DECODERS[name])


DECODERS = {"gpt": GPT, "wide-gpt": WIDE_GPT}
"""Sizes of the decoders, the jobs whose rows are tokens."""

JOBS = {
    "cnn": Job(make_model=_cnn, draw=_draw_images, batch=256, epoch=50_000, make_optimizer=_momentum),
    "resnet": Job(make_model=_resnet, draw=_draw_images, batch=32, epoch=50_000, make_optimizer=_momentum),
    **{
        name: Job(
            make_model=partial(_decoder, name),
            draw=_draw_tokens,
            batch=16,
            epoch=10_000,
            make_optimizer=_adam,
            can_be_divided=True,
        )
        for name in DECODERS
    },
}
"""Jobs by the name of their network."""
