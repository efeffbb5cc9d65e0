"""Arrays in GPU memory as MPI libraries that are CUDA-aware take them. Runs on ranks.

mpi4py takes whatever describes itself by ``__cuda_array_interface__``
(https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html) and hands its address to the library.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.collective.flat_buffers import storage_of
from sparkdl.errors import CommunicatorError

if TYPE_CHECKING:
    from sparkdl.collective.device_array import DeviceArray


_entered = threading.local()


def enter_gpu(gpu: int) -> None:
    """Make a GPU the current one of this thread, as CUDA-aware libraries expect it of who calls them.

    Raises:
        CommunicatorError: if the driver refuses.
    """
    if getattr(_entered, "gpu", None) == gpu:
        return
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    result = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu) or driver.cuCtxPushCurrent_v2(
        context
    )
    if result:
        raise CommunicatorError(
            f"GPU {gpu} could not be used for MPI: the CUDA driver returned error {result}"
        )
    _entered.gpu = gpu


@dataclass(frozen=True)
class DeviceElements:
    """Elements in GPU memory, seen as unsigned integers of their width: MPI moves them without knowing their type."""

    pointer: int
    size: int
    item_bytes: int

    def __getitem__(self, part: slice) -> DeviceElements:
        start, stop, _ = part.indices(self.size)
        return DeviceElements(self.pointer + start * self.item_bytes, stop - start, self.item_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size,),
            "typestr": f"|u{self.item_bytes}" if self.item_bytes == 1 else f"<u{self.item_bytes}",
            "data": (self.pointer, False),
            "version": 3,
        }


class DeviceBuffer:
    """An array in GPU memory, with as much of :class:`~sparkdl.collective.flat_buffers.FlatBuffer` as messages need.

    Attributes:
        dtype: the array's.
        data: its elements.
        owner: the array, which keeps its memory.
    """

    def __init__(self, array: DeviceArray) -> None:
        self.dtype = array.dtype
        self.data = DeviceElements(array.pointer, array.count, storage_of(array.dtype).itemsize)
        self.owner = array

    @property
    def unread(self) -> DeviceElements:
        """The elements."""
        return self.data

    def enter(self) -> None:
        """Prepare this thread for calls of MPI with the elements."""
        if self.owner.gpu is not None:
            enter_gpu(self.owner.gpu)
