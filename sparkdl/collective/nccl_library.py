"""Where NCCL is found on this machine. Runs on ranks.

The library itself is opened by ``sparkdl._native.NcclLibrary``, which lists what it needs of it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache
from pathlib import Path

from sparkdl import _native
from sparkdl.errors import CommunicatorError, TransportUnavailableError

logger = logging.getLogger(__name__)

LIBRARY_VARIABLE = "SPARKDL_NCCL_LIBRARY"
"""Environment variable with the path of the NCCL library to use where the caller names none."""

_SONAME = "libnccl.so.2"
_DRIVER = "libcuda.so.1"


def load_nccl(path: str | None = None) -> _native.NcclLibrary:
    """Load NCCL: from a path if there is one, else from the ``nvidia-nccl-cu*`` wheel, else the system's.

    Loading it again gives the same library.

    Args:
        path: the library file; by default what ``SPARKDL_NCCL_LIBRARY`` says.

    Raises:
        TransportUnavailableError: if it cannot be loaded or is too old, or there is no NVIDIA driver; the message says
            what was tried and what to install.
    """
    given = path or os.environ.get(LIBRARY_VARIABLE)
    return _load((given,) if given else (*_in_wheel(), _SONAME))


@cache
def _load(candidates: tuple[str, ...]) -> _native.NcclLibrary:
    try:
        library = _native.NcclLibrary(list(candidates), [_DRIVER])
    except CommunicatorError as error:
        raise TransportUnavailableError(
            f"NCCL is not available: {error}. It needs an NVIDIA driver and NCCL 2.18 or later. Run: pip install"
            f" nvidia-nccl-cu12 (nvidia-nccl-cu13 for a driver of CUDA 13), or name a library in {LIBRARY_VARIABLE}."
        ) from error
    logger.info("NCCL %s from %s", library.version, library.path)
    return library


def _in_wheel() -> tuple[str, ...]:
    """The library of the ``nvidia-nccl-cu*`` wheel, if that is installed."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return ()
    folders = spec.submodule_search_locations if spec is not None else None
    files = [Path(folder) / "lib" / _SONAME for folder in folders or ()]
    return tuple(str(file) for file in files if file.exists())
