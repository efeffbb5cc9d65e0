"""Horovod's questions about how it was built, answered by what stands in its place here."""

from __future__ import annotations

import importlib.util

import torch

from sparkdl.horovod.torch.current_session import has_session, session


def mpi_built() -> bool:
    """``transport="mpi"`` can be had: mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """The ranks communicate over MPI."""
    return has_session() and session().world.transport == "mpi"


def mpi_threads_supported() -> bool:
    """MPI may be used by several threads; sparkdl starts it so.

    Raises:
        ValueError: if the ranks do not communicate over MPI.
    """
    if not mpi_enabled():
        raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")
    return True


def gloo_built() -> bool:
    """True: the native core is there, which stands where Horovod has Gloo."""
    return True


def gloo_enabled() -> bool:
    """The ranks communicate over the native core, which stands where Horovod has Gloo."""
    return has_session() and not mpi_enabled()


def nccl_built() -> int:
    """0: CUDA tensors go through host memory."""
    return 0


def ddl_built() -> bool:
    """False: IBM's library is not used."""
    return False


def ccl_built() -> bool:
    """False: Intel's library is not used."""
    return False


def cuda_built() -> bool:
    """CUDA tensors can be given: torch has CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """ROCm tensors can be given: torch has ROCm."""
    return torch.version.hip is not None
