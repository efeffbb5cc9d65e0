"""Attributes of packages that are imported on first use: importing a package does not import all its modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def attributes(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package (PEP 562); the latter is what editors complete.

    Args:
        package: name of the package.
        modules: module of each attribute, by the attribute's name; a leading dot stands for the package.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name], package), name)

    return load, lambda: sorted({*vars(importlib.import_module(package)), *modules})
