"""What can be wrong with the data of a fit, found on the *driver* before any rank starts.

Everything raises :class:`sparkdl.errors.DataError` with the column, what was found and what to do.
"""

from __future__ import annotations

from sparkdl.data.dataset import ParquetDataset
from sparkdl.errors import DataError


def check_labels(dataset: ParquetDataset, column: str, num_classes: int) -> None:
    """Check that the labels of a classification are whole numbers in ``[0, num_classes)``.

    Costs nothing: the range comes from the footers of the files. Where a writer left it out, the labels pass.

    Args:
        dataset: the dataset.
        column: name of the label column.
        num_classes: number of classes, as of the model's last layer.

    Raises:
        DataError: if the column does not exist, is no integer scalar, or has labels outside the range.
    """
    label = dataset.column(column)
    if label.shape or "int" not in label.dtype:
        raise DataError(
            f"Labels must be whole numbers in [0, {num_classes}), but column {column!r} holds "
            f"{'arrays of ' if label.shape else ''}{label.dtype}. Cast it to int or bigint."
        )
    if label.value_range is None:
        return
    low, high = label.value_range
    if low < 0 or high >= num_classes:
        raise DataError(
            f"Labels must lie in [0, {num_classes}), but column {column!r} holds {low} to {high}. Number the classes from 0, "
            f"or give the model {high + 1} outputs."
        )
