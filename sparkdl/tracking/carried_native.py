"""The native extension in the wheel that a logged model carries, where it is named ``sparkdl._native``.

Modules of sparkdl that name the extension can be imported with it, such as that of a ``SyncBatchNorm`` in a model.
What the extension does needs an installed sparkdl.
"""

from __future__ import annotations

from typing import Any


class _Missing:
    """Something of the extension, which fails when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        self._fail()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._fail()

    def _fail(self) -> Any:
        raise ImportError(
            f"sparkdl._native.{self._name} is part of an installed sparkdl, and this process uses the modules that a "
            "logged model carries, which have no communication between ranks. Install sparkdl-torch."
        )


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(name)
