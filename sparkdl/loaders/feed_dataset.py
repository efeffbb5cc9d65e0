"""A feed as a dataset of torch, for its DataLoader: :class:`FeedDataset`.

Batches are tensors over the memory of the feed's arrays. A feed reads ahead in its own threads, so a DataLoader around
it needs no workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from sparkdl.errors import ParamError
from sparkdl.patches.collate import set_collate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from sparkdl.data import BlendedFeed, ParquetFeed


class FeedBatch(dict[str, Any]):
    """A batch by column name. By this type torch's ``default_collate`` distinguishes a batch from a sample."""


def _refuse_to_join(batch: list[FeedBatch], **_: Any) -> NoReturn:
    num_rows = len(next(iter(batch[0].values()), ()))
    raise ParamError(
        f"A DataLoader was about to join {len(batch)} batches of a feed, of {num_rows} rows each, into one. A "
        "FeedDataset gives whole batches: write DataLoader(FeedDataset(feed), batch_size=None), and give the feed "
        "the batch_size."
    )


set_collate(
    FeedBatch,
    _refuse_to_join,
    otherwise="a DataLoader around a FeedDataset without batch_size=None will make batches of batches",
)


class FeedDataset(IterableDataset[dict[str, Any]]):
    """The batches of a feed as dicts of tensors: ``DataLoader(FeedDataset(feed), batch_size=None)``.

    Each iteration yields the feed's current epoch and advances the feed to the next one. Tensors share memory with the
    feed's arrays; columns for which torch has no dtype, such as strings, dates and timestamps, stay arrays. A
    DataLoader still tries to make tensors of dates and timestamps, and fails; with ``collate_fn=lambda batch: batch``
    it leaves batches as they are. Without ``batch_size=None`` a DataLoader would make batches of batches, with one more
    dimension; its default collate function raises a :class:`~sparkdl.errors.ParamError` instead.

    Args:
        feed: a :class:`~sparkdl.data.ParquetFeed` or a blend of them; the caller closes it.
    """

    def __init__(self, feed: ParquetFeed | BlendedFeed) -> None:
        self._feed = feed

    def __len__(self) -> int:
        """Return the number of batches of the next iteration."""
        return len(self._feed)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the batches of the current epoch.

        Raises:
            ParamError: if called in a worker process of a DataLoader.
        """
        if get_worker_info() is not None:
            raise ParamError(
                "A FeedDataset was given to a DataLoader with num_workers above 0, where every worker would give all "
                "rows once more. Leave num_workers at 0: the feed reads ahead in threads of its own (num_threads)."
            )
        for batch in self._feed:
            yield FeedBatch((name, as_tensor(array)) for name, array in batch.items())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0, that the next iteration yields.

        Raises:
            ParamError: if the feed is a blend, which runs continuously through the epochs of its feeds.
        """
        self._feed.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the feed's position; see :meth:`sparkdl.data.ParquetFeed.state`."""
        return self._feed.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; see :meth:`sparkdl.data.ParquetFeed.resume`."""
        self._feed.resume(state)


def as_tensor(array: npt.NDArray[Any]) -> Tensor | npt.NDArray[Any]:
    """Return an array as a tensor over its memory, or as it is where torch has no dtype for it."""
    return torch.from_numpy(array) if array.dtype.kind in "biuf" else array
