"""A feed as ``torch.utils.data.IterableDataset``: batches of tensors over the memory of the feed's arrays.

Runs on a *rank*. The feed reads ahead in threads of its own, so the DataLoader around it needs no workers.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from sparkdl.data import BlendedFeed
from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from sparkdl.data import ParquetFeed

logger = logging.getLogger(__name__)


class FeedBatch(dict[str, Any]):
    """A batch by column name; a type of its own, so that torch's ``default_collate`` can tell that it is no sample."""


def _refuse_to_join(batch: list[FeedBatch], **_: Any) -> NoReturn:
    num_rows = len(next(iter(batch[0].values()), ()))
    raise ParamError(
        f"A DataLoader was about to join {len(batch)} batches of a feed, of {num_rows} rows each, into one. A "
        "FeedDataset gives whole batches: write DataLoader(FeedDataset(feed), batch_size=None), and give the feed "
        "the batch_size."
    )


def _refuse_joining() -> None:
    """Have torch's ``default_collate`` refuse to join batches, by its map that is documented for types of one's own.

    The map lies in a private module of torch; where a release has moved it, batches are joined, and that is logged.
    """
    try:
        functions = import_module("torch.utils.data._utils.collate").default_collate_fn_map
        functions[FeedBatch] = _refuse_to_join
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning(
            "This release of torch cannot be told that a FeedDataset gives whole batches (%s): a DataLoader without "
            "batch_size=None will make batches of batches.",
            error,
        )


_refuse_joining()


class FeedDataset(IterableDataset[dict[str, Any]]):
    """The batches of a feed as dicts of tensors: ``DataLoader(FeedDataset(feed), batch_size=None)``.

    Each iteration gives the feed's current epoch and moves it on to the next one. Tensors share memory with the feed's
    arrays; columns of what torch has no dtype for, such as strings, dates and timestamps, stay arrays. A DataLoader
    tries to make tensors of dates and timestamps all the same, and fails; with ``collate_fn=lambda batch: batch`` it
    leaves batches as they are. Without ``batch_size=None`` a DataLoader would make batches of batches, of one more
    dimension; its own way to join them raises a :class:`~sparkdl.errors.ParamError`.

    Args:
        feed: a :class:`~sparkdl.data.ParquetFeed` or a blend of them; closed by whoever made it.
    """

    def __init__(self, feed: ParquetFeed | BlendedFeed) -> None:
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
            yield FeedBatch((name, as_tensor(array)) for name, array in batch.items())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0, that the next iteration gives.

        Raises:
            ParamError: of a blend, which runs on through the epochs of its feeds.
        """
        if isinstance(self._feed, BlendedFeed):
            raise ParamError(
                "A blend runs on through the epochs of its feeds and has none to choose; leave it out."
            )
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
