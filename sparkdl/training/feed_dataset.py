"""A feed as ``torch.utils.data.IterableDataset``: batches of tensors over the memory of the feed's arrays.

Runs on a *rank*. The feed reads ahead in threads of its own, so the DataLoader around it needs no workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from sparkdl.data import ParquetFeed


class FeedDataset(IterableDataset[dict[str, Any]]):
    """The batches of a feed as dicts of tensors: ``DataLoader(FeedDataset(feed), batch_size=None)``.

    Each iteration gives the feed's current epoch and moves it on to the next one. Tensors share memory with the feed's
    arrays; columns of what torch has no dtype for, such as strings, dates and timestamps, stay arrays. A DataLoader
    tries to make tensors of dates and timestamps all the same, and fails; with ``collate_fn=lambda batch: batch`` it
    leaves batches as they are.

    Args:
        feed: closed by whoever made it.
    """

    def __init__(self, feed: ParquetFeed) -> None:
        self._feed = feed

    def __len__(self) -> int:
        """Batches that the next iteration gives."""
        return len(self._feed)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the batches of the current epoch.

        Raises:
            ParamError: in a worker of a DataLoader.
        """
        if get_worker_info() is not None:
            raise ParamError(
                "A FeedDataset was given to a DataLoader with num_workers above 0, where every worker would give all "
                "rows once more. Leave num_workers at 0: the feed reads ahead in threads of its own (num_threads)."
            )
        for batch in self._feed:
            yield {name: as_tensor(array) for name, array in batch.items()}

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0, that the next iteration gives."""
        self._feed.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the feed stands; see :meth:`sparkdl.data.ParquetFeed.state`."""
        return self._feed.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; see :meth:`sparkdl.data.ParquetFeed.resume`."""
        self._feed.resume(state)


def as_tensor(array: npt.NDArray[Any]) -> Tensor | npt.NDArray[Any]:
    """Return an array as a tensor over its memory, or as it is where torch has no dtype for it."""
    return torch.from_numpy(array) if array.dtype.kind in "biuf" else array
