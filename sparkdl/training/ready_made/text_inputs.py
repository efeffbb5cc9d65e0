"""A column of texts as a network takes it. On *ranks*, in predictions, and when a fit is tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.errors import DataError
from sparkdl.training.ready_made.tokenizers import PADDING, START, Tokenizer

TOKENS = "numbers of tokens"


@dataclass(frozen=True, kw_only=True)
class TextInputs:
    """Makes the numbers of the tokens of each text, filled up to the longest of a batch; saved with the model.

    Attributes:
        column: name of the column.
        tokenizer: makes numbers of a text.
        max_length: tokens of a text that count; what comes after them is left out.
    """

    column: str
    tokenizer: Tokenizer
    max_length: int

    def __call__(self, columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.int64]]:
        """Return ``(rows, 1 + longest)``, where each row begins with a start.

        Raises:
            DataError: if a row holds no text.
        """
        texts = [
            self.tokenizer.encode(text, self.max_length)
            for text in checked_texts(columns[self.column], self.column)
        ]
        longest = max((len(text) for text in texts), default=0)
        tokens = np.full((len(texts), 1 + longest), PADDING, np.int64)
        tokens[:, 0] = START
        for row, text in zip(tokens, texts, strict=True):
            row[1 : 1 + len(text)] = text
        return {TOKENS: tokens}


def checked_texts(rows: npt.NDArray[Any], column: str) -> list[str]:
    """Return the rows of a column as a list of texts.

    Raises:
        DataError: if a row holds none.
    """
    for index, row in enumerate(rows):
        if not isinstance(row, str):
            raise DataError(
                f"Column {column!r} holds no text in row {index} of its batch, but {type(row).__name__}. Give a string."
            )
    return list(rows)
