"""The choice of the dataset that supplies each sample, so that counts follow weights as closely as whole samples can.

It computes with integers and reads no data. The result is the same on every *rank*: it depends only on weights, seed
and position.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sparkdl.data.dataset.row_choice import random_bits
from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_SCALE = 1 << 40
"""Largest common denominator of weights. Weights that need a larger one are rounded, by at most one sample in 10^12."""

_MAX_TABLE = 1 << 14
"""Mixtures that repeat after at most this number of samples are computed once and then looked up."""

_FEW = 16
"""Number of datasets up to which a loop over Python integers is faster than NumPy calls."""


class Mixture:
    """A sequence of datasets that follows weights at every point.

    Every sample comes from the dataset with the largest lag behind its share, ``weight * samples - drawn``; of
    all choices this one leaves the smallest sum of squared errors. It is the rule of Megatron-LM's blended
    datasets (``build_blending_indices`` in ``megatron/core/datasets/helpers.cpp``), with two differences: the
    next sample is counted in ``samples``, and shares are kept as integers, so that rounding errors neither
    accumulate nor depend on the machine. The seed decides between datasets with equal lags.

    No dataset is ever a whole sample ahead of its share. With simple weights such as 0.7, 0.2 and 0.1, the counts
    are exact whenever the number of samples is a multiple of the common denominator.

    Args:
        weights: positive numbers, one for each dataset; only their ratios matter.
        seed: any integer.

    Raises:
        ParamError: if there are no weights, or one is not positive and finite.
    """

    def __init__(self, weights: Sequence[float | Fraction], *, seed: int = 0) -> None:
        self._shares = _whole_shares(weights)
        self._scale = sum(self._shares)
        # The first of several maxima wins; datasets are compared in this order.
        keys = random_bits(seed).random_raw(len(self._shares))
        self._order = [int(index) for index in np.argsort(keys, kind="stable")]
        self._drawn = [0] * len(self._shares)
        self._repeats = self._scale <= _MAX_TABLE
        self._table: npt.NDArray[np.intp] | None = None

    @property
    def drawn(self) -> tuple[int, ...]:
        """Number of samples that each dataset has supplied so far, which is the whole position of a mixture."""
        return tuple(self._drawn)

    @drawn.setter
    def drawn(self, drawn: Sequence[int]) -> None:
        if len(drawn) != len(self._shares) or min(drawn) < 0:
            raise ParamError(f"A mixture of {len(self._shares)} datasets cannot continue from {list(drawn)}.")
        self._drawn = [int(count) for count in drawn]
        # If the counts come from other weights, some datasets first catch up; the table does not cover that.
        self._repeats = self._scale <= _MAX_TABLE and self._counts_are_its_own()

    def draw(self, num_samples: int) -> npt.NDArray[np.intp]:
        """Return the numbers of the datasets that supply the next samples."""
        position = sum(self._drawn)
        if self._repeats and position + num_samples > self._scale:
            chosen = self._round()[(position + np.arange(num_samples)) % self._scale]
        else:
            lags = [
                share * position - self._scale * drawn
                for share, drawn in zip(self._shares, self._drawn, strict=True)
            ]
            chosen = self._compute(num_samples, lags)
        counts = np.bincount(chosen, minlength=len(self._drawn))
        self._drawn = [before + int(count) for before, count in zip(self._drawn, counts, strict=True)]
        return chosen

    def _round(self) -> npt.NDArray[np.intp]:
        """Return the datasets of one period, after which all lags are 0 again and the mixture repeats itself."""
        if self._table is None:
            self._table = self._compute(self._scale, [0] * len(self._shares))
        return self._table

    def _counts_are_its_own(self) -> bool:
        rounds, rest = divmod(sum(self._drawn), self._scale)
        counts = np.bincount(self._round()[:rest], minlength=len(self._drawn))
        return all(
            drawn == rounds * share + count
            for drawn, share, count in zip(self._drawn, self._shares, counts, strict=True)
        )

    def _compute(self, num_samples: int, lags: list[int]) -> npt.NDArray[np.intp]:
        shares = [self._shares[index] for index in self._order]
        ordered = [lags[index] for index in self._order]
        if len(lags) == 2 and -self._scale <= 2 * ordered[0] < self._scale and num_samples <= _MAX_TABLE:
            chosen: Sequence[int] | npt.NDArray[np.intp] = _compute_two(
                num_samples, ordered[0], shares[0], self._scale
            )
        else:
            # Counts that come from other weights may lag by more than 64 bits can hold.
            fits = max(map(abs, lags)) < 1 << 62
            compute = _compute_many if fits and len(lags) > _FEW else _compute_few
            chosen = compute(num_samples, ordered, shares, self._scale)
        return np.asarray(self._order, np.intp)[chosen]


def _whole_shares(weights: Sequence[float | Fraction]) -> list[int]:
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ParamError(
            f"Weights must be positive and finite, one for each dataset; got {list(weights)}. Leave a dataset "
            "of weight 0 out."
        )
    # Converted from their text, so that 0.1 means a tenth and not the nearest binary fraction.
    exact = [Fraction(str(weight)) for weight in weights]
    scaled = [weight / sum(exact) for weight in exact]
    scale = math.lcm(*(weight.denominator for weight in scaled))
    shares = [max(1, round(weight * min(scale, _MAX_SCALE))) for weight in scaled]
    divisor = math.gcd(*shares)
    return [share // divisor for share in shares]


def _compute_two(num_samples: int, lag: int, share: int, scale: int) -> npt.NDArray[np.intp]:
    # The first of two datasets has the larger lag if its lag is half a sample or more: its count is its share, rounded.
    twice = 2 * (lag + share * np.arange(num_samples + 1)) + scale
    return 1 - np.diff(twice // (2 * scale))


def _compute_few(num_samples: int, lags: list[int], shares: list[int], scale: int) -> list[int]:
    chosen = []
    for _ in range(num_samples):
        lags = [lag + share for lag, share in zip(lags, shares, strict=True)]
        index = lags.index(max(lags))
        lags[index] -= scale
        chosen.append(index)
    return chosen


def _compute_many(num_samples: int, lags: list[int], shares: list[int], scale: int) -> npt.NDArray[np.intp]:
    # A sample is at most 2^41, and a dataset lags by a few of them.
    lag, share = np.asarray(lags, np.int64), np.asarray(shares, np.int64)
    chosen = np.empty(num_samples, np.intp)
    for sample in range(num_samples):
        lag += share
        index = chosen[sample] = lag.argmax()
        lag[index] -= scale
    return chosen
