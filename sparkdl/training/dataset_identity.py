"""What tells one dataset from another, as far as a driver may read it: checksums of its rows, columns and row groups.

Runs on the *driver* and on a *rank*.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.data import ParquetFeed
from sparkdl.training.descriptions import checksum

if TYPE_CHECKING:
    import numpy.typing as npt

    from sparkdl.data import ParquetDataset
    from sparkdl.training.spec import TrainingSpec

_FIRST_ROWS = 64
_COMPARED_BYTES = 64 << 20
"""How large a dataset may be in memory for all its rows to be compared, which takes about half a second."""
_ROWS_AT_ONCE = 4096


def dataset_identity(dataset: ParquetDataset, spec: TrainingSpec, read_timeout_s: float) -> dict[str, Any]:
    """Return what a fit compares of the rows that it trains on, as JSON holds it."""
    marks = () if spec.training_rows is None else tuple(spec.training_rows.columns)
    names = tuple(dict.fromkeys((*spec.columns(), *marks)))
    chosen = None if spec.training_rows is None else spec.training_rows.counts
    return {
        "number of rows": dataset.num_rows,
        **{f"column {name!r}": _column(dataset, name) for name in names},
        "row groups": counts_digest(dataset.row_counts),
        "training rows": counts_digest(chosen or dataset.row_counts),
        "first rows": _first_rows(dataset, names, read_timeout_s),
        "rows": _all_rows(dataset, names, read_timeout_s),
    }


def dataset_digest(dataset: ParquetDataset, names: Sequence[str], *, read_timeout_s: float = 600.0) -> str:
    """Return a hash of columns of a dataset: of their types, the rows of each row group, and the first 64 rows."""
    described = [_column(dataset, name) for name in names]
    counts = counts_digest(dataset.row_counts)
    text = "\n".join([*names, *described, counts, _first_rows(dataset, tuple(names), read_timeout_s)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def counts_digest(counts: Sequence[int]) -> str:
    """Return a checksum of numbers of rows."""
    return checksum(np.array(counts, dtype=np.int64).tobytes())


def _column(dataset: ParquetDataset, name: str) -> str:
    column = dataset.column(name)
    return f"{column.kind} {column.dtype} {tuple(column.shape)}"


def _first_rows(dataset: ParquetDataset, names: tuple[str, ...], read_timeout_s: float) -> str:
    digest = hashlib.sha256()
    with ParquetFeed(
        dataset,
        columns=names,
        batch_size=min(_FIRST_ROWS, dataset.num_rows),
        shuffle=False,
        read_timeout_s=read_timeout_s,
    ) as feed:
        for name, values in next(feed.epoch(0)).items():
            digest.update(name.encode())
            if values.dtype == object:
                digest.update("".join(map(str, values.tolist())).encode())
            else:
                digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:16]


def _all_rows(dataset: ParquetDataset, names: tuple[str, ...], read_timeout_s: float) -> str | None:
    """Return a checksum of all rows in any order, as Spark may write them in another one; None of a large dataset."""
    row_bytes = sum(dataset.column(name).row_bytes for name in names)
    if dataset.num_rows * row_bytes > _COMPARED_BYTES:
        return None
    total = np.uint64(0)
    with ParquetFeed(
        dataset, columns=names, batch_size=_ROWS_AT_ONCE, shuffle=False, read_timeout_s=read_timeout_s
    ) as feed:
        for batch in feed.epoch(0):
            hashes = np.zeros(len(batch[names[0]]), np.uint64)
            for name in names:
                for words in _words(batch[name]):
                    hashes = _mixed(hashes ^ words)
            total = np.add.reduce(hashes, initial=total)
    return f"{int(total):016x}"


def _words(values: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return what rows hold as 64-bit words, of shape ``(words, rows)``; of objects a checksum each."""
    if values.dtype == object:
        sums = [hashlib.blake2b(_content(value), digest_size=8).digest() for value in values]
        return np.frombuffer(b"".join(sums), np.uint64).reshape(1, -1)
    flat = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
    return np.pad(flat, ((0, 0), (0, -flat.shape[1] % 8))).view(np.uint64).T


def _content(value: Any) -> bytes:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.dtype} {value.shape} ".encode() + value.tobytes()
    return value if isinstance(value, bytes) else str(value).encode()


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread each bit over all of its word: the step of splitmix64 (Steele, Lea, Flood 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
