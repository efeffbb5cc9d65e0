"""``hvd.elastic.ElasticSampler``: divides the indices that an epoch has not yet used among the ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from itertools import cycle, islice
from typing import Any

import torch.utils.data

from sparkdl.horovod.torch.basics import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Gives each rank the same number of indices; some indices are repeated if they do not divide evenly.

    Call ``record_batch`` after every batch and ``set_epoch`` at the end of every epoch, and make the sampler part of a
    :class:`~sparkdl.horovod.torch.elastic.TorchState`: an epoch that is resumed then continues where it was committed.

    Attributes:
        epoch: number of the epoch.
        processed_num: number of indices that all ranks together have used in the epoch.
        num_samples: number of indices of this rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """Begin with epoch 0.

        Args:
            dataset: dataset whose indices are divided; its length must not change.
            shuffle: whether to shuffle the indices, in a different order in every epoch.
            seed: seed of the shuffling, the same on all ranks.
        """
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with all indices unused."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002  # Horovod's argument
        """Record that every rank has used a batch.

        Args:
            batch_idx: ignored.
            batch_size: number of indices in the batch of each rank.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and the number of its indices that have been used."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from where :meth:`state_dict` was taken."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the indices that the epoch has not used among the current ranks."""
        self.num_replicas = size()
        self.rank = rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)  # noqa: S311  # an order, no secret
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return islice(cycle(self.remaining_indices), self.rank, self.total_size, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
