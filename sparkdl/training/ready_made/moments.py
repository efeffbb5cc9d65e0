"""Mean and spread of columns of numbers, found in one pass."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Moments:
    """Mean and standard deviation of each column of what is added, batch by batch.

    In float64 by the parallel algorithm of Chan, Golub and LeVeque (1979), which stays exact where the mean is large
    beside the spread.

    Attributes:
        num_rows: rows that were added.
        mean: ``(columns,)``; empty before the first batch.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self.mean: npt.NDArray[np.float64] = np.zeros(0)
        self._squares: npt.NDArray[np.float64] = np.zeros(0)

    def add(self, values: npt.NDArray[np.floating]) -> None:
        """Add a batch of shape ``(rows, columns)``."""
        rows = len(values)
        if not rows:
            return
        batch = values.astype(np.float64)
        mean = batch.mean(axis=0)
        squares = ((batch - mean) ** 2).sum(axis=0)
        if not self.num_rows:
            self.num_rows, self.mean, self._squares = rows, mean, squares
            return
        total, difference = self.num_rows + rows, mean - self.mean
        self._squares += squares + difference**2 * (self.num_rows * rows / total)
        self.mean = self.mean + difference * (rows / total)
        self.num_rows = total

    @property
    def deviation(self) -> npt.NDArray[np.float64]:
        """Standard deviation of each column, ``(columns,)``; 1 for one that is constant, which leaves it as it is."""
        deviation = np.sqrt(self._squares / max(self.num_rows, 1))
        # What rounding leaves of a constant is no spread.
        is_constant = deviation <= 1e-9 * np.abs(self.mean)
        return np.where(is_constant, 1.0, deviation)
