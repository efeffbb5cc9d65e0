"""What somebody meant who mistyped a word. Runs on the *driver*."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a sentence that names the word that is most like it, or all of them."""
    words = list(known)
    folded = {each.lower(): each for each in words}
    near = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.6)
    return f"Did you mean {folded[near[0]]}?" if near else f"There is: {', '.join(words)}."
