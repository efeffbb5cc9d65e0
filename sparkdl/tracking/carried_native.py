"""Stand-in for the native extension in the wheel of a logged model, where it is named ``sparkdl._native``.

With it, modules of sparkdl that import the extension, such as that of a ``SyncBatchNorm`` in a model, can be imported
without an installed sparkdl. Calling the extension needs one.
"""

from __future__ import annotations

from typing import Any


class _Missing:
    """Stand-in for a name of the extension; using it raises an error."""

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
            f"sparkdl._native.{self._name} needs an installed sparkdl; the copy of sparkdl in a logged model has no "
            "communication between ranks. Install sparkdl-torch."
        )


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(name)
