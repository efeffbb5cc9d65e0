"""A multilayer perceptron for tables, with its inputs: standardized numbers and embedded categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn


class TabularNetwork(nn.Module):
    """Standardizes numbers, embeds categories, and passes both through layers of ``Linear``, ``ReLU``, ``Dropout``.

    Called with numbers ``(rows, numbers)`` and category numbers ``(rows, categorical columns)``, or with one of them if
    there are only numbers or only categories. The category number 0 stands for a category that was not in the training
    data; it is embedded as zeros. With ``output_mean`` and ``output_deviation``, as for a regression, the layers learn
    standardized values. Numbers are standardized in float64, and outputs that are not standardized are float64: in
    float32, seconds since 1970 would be rounded to minutes.

    Args:
        mean: mean of each number, ``(numbers,)``; empty if there are only categories.
        deviation: standard deviation of each number, ``(numbers,)``.
        num_categories: number of known categories of each categorical column.
        hidden_sizes: width of each hidden layer; empty for a linear model.
        dropout: share of the outputs of hidden layers that are dropped in training.
        num_outputs: number of outputs per row.
        output_mean: number that is added to the outputs.
        output_deviation: factor of the outputs, applied before that.
        imputes: whether NaN stands for a missing number, which is replaced by the mean of its column; otherwise the
            output for such a row is NaN.
        indicators: positions of the numbers for which the layers are also told whether they are missing.
    """

    mean: Tensor
    deviation: Tensor
    output_mean: Tensor
    output_deviation: Tensor

    number_dtype = torch.float64
    """The dtype of numbers and labels."""

    def __init__(
        self,
        *,
        mean: Any,
        deviation: Any,
        num_categories: Sequence[int] = (),
        hidden_sizes: Sequence[int],
        dropout: float,
        num_outputs: int,
        output_mean: float = 0.0,
        output_deviation: float = 1.0,
        imputes: bool = False,
        indicators: Sequence[int] = (),
    ) -> None:
        super().__init__()
        scales = {
            "mean": mean,
            "deviation": deviation,
            "output_mean": output_mean,
            "output_deviation": output_deviation,
        }
        for name, value in scales.items():
            self.register_buffer(name, torch.from_numpy(np.array(value, np.float64)))
        self.imputes, self.indicators = imputes, list(indicators)
        self.embeddings = nn.ModuleList(
            nn.Embedding(count + 1, _embedding_size(count), padding_idx=0) for count in num_categories
        )
        width = self.mean.numel() + len(indicators) + sum(_embedding_size(count) for count in num_categories)
        layers: list[nn.Module] = []
        for size in hidden_sizes:
            layers += [nn.Linear(width, size), nn.ReLU(), nn.Dropout(dropout)]
            width = size
        self.layers = nn.Sequential(*layers, nn.Linear(width, num_outputs))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return ``(rows, outputs)``."""
        parts = []
        dtype = next(self.layers.parameters()).dtype
        if self.mean.numel():
            numbers = inputs[0].to(self.mean.dtype).flatten(1)
            scaled = ((numbers - self.mean) / self.deviation).to(dtype)
            if self.imputes:
                is_missing = numbers.isnan()
                scaled = scaled.masked_fill(is_missing, 0.0)  # the mean
                parts.append(is_missing[:, self.indicators].to(dtype))
            parts.append(scaled)
        if self.embeddings:
            codes = inputs[-1]
            parts += [embed(codes[:, index]) for index, embed in enumerate(self.embeddings)]
        # In float16, labels of 100,000 would become infinite, and in float32 they would lose their hundredths.
        outputs: Tensor = self.layers(torch.cat(parts, dim=1)).to(self.output_mean.dtype)
        return outputs * self.output_deviation + self.output_mean


def _embedding_size(num_categories: int) -> int:
    """The rule of thumb of fastai: 1.6 times the 0.56th power, between 1 and 50."""
    return int(min(50, max(1, round(1.6 * float(num_categories) ** 0.56))))


NUMBERS = "numeric features"
CODES = "categorical features"


@dataclass(frozen=True, kw_only=True)
class TabularInputs:
    """Converts columns to a matrix of numbers and a matrix of category numbers; saved with the model.

    Attributes:
        numeric: names of the columns of numbers, scalars or arrays of fixed length.
        categories: known categories of each categorical column in ascending order, by the column's name. The first
            category has the number 1; 0 stands for every unknown value.
        origins: whole numbers that are subtracted from columns of integers too large for float64, by the column's name.
        times: names of the columns of dates and timestamps, whose parts follow the numbers; see :func:`time_parts`.
        null_categories: names of the categorical columns in which null is a category of its own, the last one.
    """

    numeric: tuple[str, ...] = ()
    categories: Mapping[str, tuple[Any, ...]]
    origins: tuple[tuple[str, int], ...] = ()
    times: tuple[str, ...] = ()
    null_categories: tuple[str, ...] = ()

    @property
    def num_categories(self) -> list[int]:
        """Number of categories of each categorical column."""
        return [len(known) + (name in self.null_categories) for name, known in self.categories.items()]

    def __call__(self, columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return numbers ``(rows, numbers)`` as float64 and category numbers ``(rows, categorical columns)`` as int64.

        Either is left out if there are no such columns.
        """
        made: dict[str, npt.NDArray[Any]] = {}
        if self.numeric or self.times:
            made[NUMBERS] = self.numbers(columns)
        if self.categories:
            codes = [
                category_codes(columns[name], known, has_null=name in self.null_categories)
                for name, known in self.categories.items()
            ]
            made[CODES] = np.stack(codes, axis=1)
        return made

    def numbers(self, columns: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
        """Return the numbers of the rows, ``(rows, numbers)``: those of the columns, then the parts of the times."""
        parts = [time_parts(np.asarray(columns[name])) for name in self.times]
        numeric = [join_columns(columns, self.numeric, dict(self.origins))] if self.numeric else []
        return np.concatenate([*numeric, *parts], axis=1)


_DAY_US = 86_400_000_000


def time_parts(times: npt.NDArray[np.datetime64]) -> npt.NDArray[np.float64]:
    """Return numbers that say when a date or a timestamp is, NaN for NaT.

    They are the seconds since 1970, and sines and cosines of the day of the week, of the time of the year, and of a
    timestamp's time of the day. Of a period, they are the first terms of its Fourier series: three for the week, so
    that a linear layer can tell each weekday from the others, and two for year and day. Instants are taken in UTC.

    Args:
        times: dates (``datetime64[D]``) or timestamps (``datetime64[us]``), ``(rows,)``.

    Returns:
        ``(rows, 11)`` for dates and ``(rows, 15)`` for timestamps.
    """
    days = times.astype("datetime64[D]")
    years = days.astype("datetime64[Y]")
    begin, end = years.astype("datetime64[D]"), (years + 1).astype("datetime64[D]")
    is_missing = np.isnat(times)
    us = np.where(is_missing, 0, times.astype("datetime64[us]").astype(np.int64))
    of_day = (us % _DAY_US) / _DAY_US
    day_of_year = (days - begin).astype(np.int64) + of_day
    phases = [
        (((us // _DAY_US) + 3) % 7 / 7, 3),  # 1970 began on a Thursday
        (day_of_year / np.maximum((end - begin).astype(np.int64), 1), 2),
        *([(of_day, 2)] if times.dtype != np.dtype("datetime64[D]") else []),
    ]
    waves = [
        wave(2 * np.pi * order * phase)
        for phase, orders in phases
        for order in range(1, orders + 1)
        for wave in (np.sin, np.cos)
    ]
    parts = np.stack([us / 1e6, *waves], axis=1)
    parts[is_missing] = np.nan
    return parts


def join_columns(
    columns: Mapping[str, npt.NDArray[Any]], names: tuple[str, ...], origins: Mapping[str, int]
) -> npt.NDArray[np.float64]:
    """Return columns of numbers side by side as ``(rows, numbers)``, without their origins; arrays are flattened."""
    parts = [_from_origin(np.asarray(columns[name]), origins.get(name, 0)) for name in names]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


_LARGE = 1 << 53
"""Up to this, float64 has all whole numbers."""


def find_offset(values: npt.NDArray[Any]) -> int:
    """Return the whole number that is to be subtracted from a column: its first one if that is too large, else 0."""
    first = int(values.flat[0]) if values.dtype.kind in "iu" and values.size else 0
    return first if abs(first) > _LARGE else 0


def _from_origin(values: npt.NDArray[Any], origin: int) -> npt.NDArray[np.float64]:
    numbers = values.astype(np.float64) - origin
    if not origin or values.dtype.kind not in "iu":
        return numbers
    exact = (values.astype(np.uint64) - np.uint64(origin % (1 << 64))).astype(np.int64)  # modulo 2**64
    return np.where(np.abs(numbers) < 2.0**62, exact, numbers)


def is_missing_category(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which values of a categorical column are missing: None among objects, NaN among numbers."""
    if values.dtype == object:
        return np.fromiter((value is None for value in values), bool, len(values))
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)


def category_codes(
    values: npt.NDArray[Any], known: tuple[Any, ...], *, has_null: bool = False
) -> npt.NDArray[np.int64]:
    """Return for each value its number among the known categories, from 1; 0 if it is not one of them.

    With ``has_null`` a missing value has the number after the last one.
    """
    null = len(known) + 1 if has_null else 0
    if values.dtype == object:
        numbers = {category: number for number, category in enumerate(known, start=1)} | {None: null}
        return np.fromiter((numbers.get(value, 0) for value in values), np.int64, len(values))
    codes = np.zeros(len(values), np.int64)
    if known:
        categories = np.array(known)
        index = np.minimum(np.searchsorted(categories, values), len(categories) - 1)
        codes = np.where(categories[index] == values, index + 1, 0).astype(np.int64)
    return np.where(is_missing_category(values), null, codes) if has_null else codes
