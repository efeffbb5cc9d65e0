"""Python code that goes along with the models that fits log. Runs on the *driver*."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_code: ContextVar[tuple[str, ...]] = ContextVar("code of logged models", default=())


@contextmanager
def models_with_code(paths: Sequence[Path]) -> Iterator[None]:
    """Have the fits of this thread log copies of files and folders with their models, which import from them."""
    token = _code.set(tuple(map(str, paths)))
    try:
        yield
    finally:
        _code.reset(token)


def current_code() -> list[str]:
    """Return the files and folders that go along with a model that is logged now."""
    return list(_code.get())
