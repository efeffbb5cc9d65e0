"""``hvd.elastic.ElasticSampler``: divides a dataset among the ranks, without what an epoch has already used."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from itertools import cycle, islice
from typing import Any

import torch.utils.data

from sparkdl.horovod.torch.basics import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Gives each rank equally many indices; some more than once where it does not come out even.

    Call ``record_batch`` after every batch and ``set_epoch`` at the end of every epoch, and have a
    :class:`~sparkdl.horovod.torch.elastic.TorchState` keep the sampler: then an epoch that is taken up again continues
    where it was committed.

    Attributes:
        epoch: number of the epoch.
        processed_num: how many indices all ranks together have used in it.
        num_samples: how many indices this rank has.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """Begin with epoch 0.

        Args:
            dataset: its length does not change.
            shuffle: whether every epoch has an order of its own.
            seed: of that order, the same on all ranks.
        """
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing has been used."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002  # Horovod's argument
        """Take note that every rank has used a batch.

        Args:
            batch_idx: without effect.
            batch_size: how many indices of each rank.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from where :meth:`state_dict` was taken."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide anew what the epoch has not used."""
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
