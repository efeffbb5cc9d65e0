"""The c10d process group of the backend ``"sparkdl"``: its name, its devices, its lifetime and its errors.

The collectives are in :mod:`sparkdl.torch.reductions` and :mod:`sparkdl.torch.movements`;
:mod:`sparkdl.torch.registration` creates groups. Errors of collectives have sparkdl's own classes, even where c10d
passes on only their text.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from sparkdl.errors import CommunicatorError
from sparkdl.patches.batches import install_batches
from sparkdl.patches.compiler import not_compiled
from sparkdl.rendezvous.deadline import to_seconds
from sparkdl.torch.futures import FutureCompleter
from sparkdl.torch.movements import Exchanges, Messages, Movements
from sparkdl.torch.reductions import Reductions
from sparkdl.torch.work import CollectiveWork, JoinedWork

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from torch._C._distributed_c10d import Store

    from sparkdl.collective import Communicator, Rendezvous
    from sparkdl.torch.submission import Accelerator


BACKEND_NAME = "sparkdl"

_FAREWELL_S = 5.0
"""The longest time for callbacks at the end of a process that failed."""

_open_groups: WeakSet[SparkdlProcessGroup] = WeakSet()
"""The groups that ``shutdown`` has not ended."""

# A forked child has none of the groups' threads: they are the parent's.
os.register_at_fork(after_in_child=_open_groups.clear)


@not_compiled  # mypy: the bases' methods differ, as torch renames some
class SparkdlProcessGroup(Reductions, Movements, Exchanges, Messages, dist.ProcessGroup):  # type: ignore[misc]
    """A process group whose CPU tensors travel over a communicator.

    Args:
        communicator: open communicator of the group's ranks, in the group's order.
        store: c10d store of the group.
        rendezvous: rendezvous where process sets open communicators; the same store, or the one below it.
        timeout_s: default deadline of a collective, in seconds.
        owns_communicator: whether ``shutdown`` closes the communicator.
        base_store: store below ``store``, which is kept alive as long as the group, or None.
        accelerator: backend of tensors on GPUs (see :mod:`sparkdl.torch.gpu.accelerator`), or None to refuse them.

    Attributes:
        communicator: communicator on which the group runs.
        timeout_s: default deadline of collectives, in seconds.
        accelerator: backend of tensors on GPUs, or None.
    """

    def __init__(
        self,
        communicator: Communicator,
        store: Store,
        rendezvous: Rendezvous,
        *,
        timeout_s: float,
        owns_communicator: bool,
        base_store: Store | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        # Only this form of the constructor, not the one that takes the store, makes an object of a subclass.
        super().__init__(communicator.rank, communicator.world_size)  # type: ignore[call-arg]  # the stub lacks it
        self.communicator = communicator
        self._store = store
        self._base_store = base_store
        self.rendezvous = rendezvous
        self.timeout_s = timeout_s
        self._owns_communicator = owns_communicator
        self.accelerator = accelerator
        if accelerator is not None:
            install_batches()
        self._completer = FutureCompleter(f"sparkdl-futures-{communicator.name}", timeout_s=timeout_s)
        self._message_completer = FutureCompleter(
            f"sparkdl-messages-{communicator.name}", timeout_s=timeout_s, in_order=False
        )
        self._coalesced: list[CollectiveWork] | None = None
        self._group_name = ""
        self._group_description = "undefined"
        self._sequence_number = 0
        if not _open_groups:
            # Again for each first group, so that it runs before the handler that closes the job's communicator.
            atexit.unregister(_leave_groups)
            atexit.register(_leave_groups)
        _open_groups.add(self)

    @property
    def failure(self) -> Exception | None:
        """The first error of an asynchronous operation of this group; None if there was none."""
        failure = self._completer.failure or self._message_completer.failure
        return failure or (self.accelerator.failure if self.accelerator is not None else None)

    def shutdown(self) -> None:
        """Complete the operations in progress and close what the group opened. Idempotent."""
        if self.accelerator is not None:
            self.accelerator.shutdown()
            self.accelerator = None
        self._end(self.timeout_s)

    def leave(self, failure: BaseException | None) -> None:
        """End the group's threads at the end of the process, as they would make it crash.

        At that time Python ends a thread that returns from native code, and C++ then aborts the process. The
        accelerator is left to its library.

        Args:
            failure: error that the process ends with, or None; after an error, operations in progress need not be
                completed.
        """
        if failure is not None:
            if not self._owns_communicator:
                return  # the job's communicator, which is aborted next
            self.communicator.abort(
                f"rank {self.communicator.rank} failed: {type(failure).__name__}: {failure}"
            )
        self._end(self.timeout_s if failure is None else _FAREWELL_S)

    def _end(self, timeout_s: float) -> None:
        _open_groups.discard(self)
        if self._owns_communicator:
            self.communicator.close()
        self._completer.close(timeout_s)
        self._message_completer.close(timeout_s)

    def abort(self, reason: str | None = None) -> None:
        """Make every collective of the group fail, here and on the other ranks, with the reason in their errors."""
        if self.accelerator is not None:
            self.accelerator.abort()
        self.communicator.abort(reason or f"rank {self.communicator.rank} aborted the process group")

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default deadline of collectives."""
        self.timeout_s = to_seconds(timeout)

    _set_default_timeout = set_timeout

    def get_group_store(self) -> Store:
        """The group's c10d store."""
        return self._store

    def name(self) -> str:
        """The backend's name."""
        return BACKEND_NAME

    getBackendName = name  # noqa: N815  # what C++ looks for
    _get_backend_name = name

    # c10d keeps a group's name in its backends, and this group is its own backend.
    @property
    def group_name(self) -> str:  # type: ignore[override]  # C++ looks for this spelling
        """The name that functional collectives find the group under."""
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_desc(self) -> str:
        """The description that was given when the group was created."""
        return self._group_description

    def _set_group_desc(self, desc: str) -> None:
        self._group_description = desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if self.accelerator is not None else [])]

    def _get_backend(self, device: torch.device) -> Any:
        """The backend of a device: torch's own if the accelerator is that, else the group itself."""
        if self.accelerator is not None and not self.serves_device(device):
            torch_backend = getattr(self.accelerator, "_get_backend", None)
            return self if torch_backend is None else torch_backend(torch.device(device))
        return self

    def supports_tensor_alloc(self, _: torch.device) -> bool:
        """False: FSDP, which asks for this, need not allocate its buffers from the backend."""
        return False

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def _start_coalescing(self, device: torch.device) -> None:
        if self.serves_device(device):
            self._coalesced = []
        elif self.accelerator is not None:
            self.accelerator._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        """One work for all operations since :meth:`_start_coalescing`, whose own works torch has dropped."""
        if self.accelerator is not None and not self.serves_device(device):
            return self.accelerator._end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None
        return JoinedWork(works)

    def _set_sequence_number_for_group(self) -> None:
        self._sequence_number = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence_number

    def _has_hooks(self) -> bool:
        return False


def _leave_groups() -> None:
    """Leave the groups that a program has not destroyed, which torch allows; first those that own a communicator."""
    # The exception that the interpreter has just printed before it ends.
    failure: BaseException | None = getattr(sys, "last_value", None)
    for group in sorted(_open_groups, key=lambda group: not group._owns_communicator):
        with contextlib.suppress(CommunicatorError):
            group.leave(failure)


@contextmanager
def collective_errors(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise the error of a failed collective itself instead of torch's ``RuntimeError`` that quotes it.

    ``DistributedDataParallel`` waits on c10d futures in C++, which keep only the text of an error. Around
    ``loss.backward()`` this raises, for example, the ``RankLostError`` of the allreduce. Other errors pass.

    Args:
        group: process group; None for the default group.

    Raises:
        CommunicatorError: if a collective of the group failed; the subclass says how.
    """
    try:
        yield
    except RuntimeError as error:
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        failure = group.failure if isinstance(group, SparkdlProcessGroup) else None
        if failure is None or failure is error:
            raise
        raise failure from error
