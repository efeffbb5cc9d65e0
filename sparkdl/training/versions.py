"""The version of the installed sparkdl."""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata


@lru_cache(maxsize=1)
def sparkdl_version() -> str:
    """Return the version of the installed distribution; ``"0+unknown"`` where the sources run uninstalled."""
    try:
        return metadata.version("sparkdl")
    except metadata.PackageNotFoundError:
        return "0+unknown"
