"""The c10d process group of the backend ``"sparkdl"``: its name, its devices, its life and its errors.

The collectives are in :mod:`sparkdl.torch.reductions` and :mod:`sparkdl.torch.movements`;
:mod:`sparkdl.torch.registration` creates groups. The errors of collectives have sparkdl's own classes, also where
c10d passes on only their text.
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
from sparkdl.rendezvous.deadline import to_seconds
from sparkdl.torch.movements import Exchanges, Messages, Movements
from sparkdl.torch.reductions import Reductions
from sparkdl.torch.submission import called_as_it_is
from sparkdl.torch.work import CollectiveWork, FutureCompleter, joined

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from torch._C._distributed_c10d import Store

    from sparkdl.collective import Communicator, Rendezvous


BACKEND_NAME = "sparkdl"

_FAREWELL_S = 5.0
"""How long callbacks may take at most at the end of a process that failed."""

_open_groups: WeakSet[SparkdlProcessGroup] = WeakSet()
"""The groups that ``shutdown`` has not ended."""

# A forked child has none of their threads.
os.register_at_fork(after_in_child=_open_groups.clear)


@called_as_it_is
class SparkdlProcessGroup(Reductions, Movements, Exchanges, Messages, dist.ProcessGroup):  # type: ignore[misc]  # torch renames methods
    """A process group whose CPU tensors travel over a communicator.

    Args:
        communicator: open, of the group's ranks in the group's order.
        store: the group's c10d store.
        rendezvous: where process sets find each other; the same store, or what lies below it.
        timeout_s: deadline of a collective that names none.
        owns_communicator: ``shutdown`` closes the communicator.
        base_store: the store below ``store``, to be kept as long as the group, or None.
        accelerator: what serves tensors on the GPU (see :mod:`sparkdl.torch.gpu.accelerator`), or None to refuse them.
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
        accelerator: Any = None,
    ) -> None:
        # The constructor that takes the store makes no subclassable object; only this form of it does.
        super().__init__(communicator.rank, communicator.world_size)  # type: ignore[call-arg]  # the stub lacks it
        self._communicator = communicator
        self._store = store
        self._base_store = base_store
        self.rendezvous = rendezvous
        self._timeout_s = timeout_s
        self._owns_communicator = owns_communicator
        self._accelerator = accelerator
        self._completer = FutureCompleter(f"sparkdl-futures-{communicator.name}")
        self._message_completer = FutureCompleter(f"sparkdl-messages-{communicator.name}", in_order=False)
        self._coalesced: list[CollectiveWork] | None = None
        self._group_name = ""
        self._group_description = "undefined"
        self._sequence_number = 0
        if not _open_groups:
            # Again for each first group, to run before what closes the communicator of the job.
            atexit.unregister(_leave_groups)
            atexit.register(_leave_groups)
        _open_groups.add(self)

    @property
    def communicator(self) -> Communicator:
        """The communicator below."""
        return self._communicator

    @property
    def timeout_s(self) -> float:
        """The deadline of collectives that name none."""
        return self._timeout_s

    @property
    def failure(self) -> Exception | None:
        """The first error that an asynchronous operation of this group had."""
        own = self._completer.failure or self._message_completer.failure
        return own or getattr(self._accelerator, "failure", None)

    @property
    def accelerator(self) -> Any:
        """What serves tensors on the GPU."""
        return self._accelerator

    def shutdown(self) -> None:
        """Complete what is under way and close what the group opened. Idempotent."""
        if self._accelerator is not None:
            self._accelerator.shutdown()
            self._accelerator = None
        self._end(self._timeout_s)

    def leave(self, failure: BaseException | None) -> None:
        """End the group's threads at the end of the process, which they would make a crash.

        Python ends a thread that comes back from native code then, and C++ ends the process for it. The accelerator is
        left to its library.

        Args:
            failure: what the process ends with; what is under way need not be completed then.
        """
        if failure is not None:
            if not self._owns_communicator:
                return  # the job's own, which is aborted next
            self._communicator.abort(
                f"rank {self._communicator.rank} failed: {type(failure).__name__}: {failure}"
            )
        self._end(self._timeout_s if failure is None else _FAREWELL_S)

    def _end(self, timeout_s: float) -> None:
        _open_groups.discard(self)
        if self._owns_communicator:
            self._communicator.close()
        self._completer.close(timeout_s)
        self._message_completer.close(timeout_s)

    def abort(self) -> None:
        """Make every collective of the group fail, here and on the other ranks."""
        if self._accelerator is not None:
            self._accelerator.abort()
        self._communicator.abort(f"rank {self._communicator.rank} aborted the process group")

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of collectives that name none."""
        self._timeout_s = to_seconds(timeout)

    _set_default_timeout = set_timeout

    def get_group_store(self) -> Store:
        """The group's c10d store."""
        return self._store

    def name(self) -> str:
        """The backend's name."""
        return BACKEND_NAME

    getBackendName = name  # noqa: N815  # what C++ looks for
    _get_backend_name = name

    # c10d keeps a group's name in its backends, and this group is its own.
    @property
    def group_name(self) -> str:  # type: ignore[override]  # C++ looks for this spelling
        """The name by which functional collectives find the group."""
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_desc(self) -> str:
        """What the group is for, as its maker said."""
        return self._group_description

    def _set_group_desc(self, desc: str) -> None:
        self._group_description = desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if self._accelerator is not None else [])]

    def _get_backend(self, device: torch.device) -> Any:
        """What serves a device; unless that is torch's own, the group itself, which answers what torch asks."""
        if torch.device(device).type != "cpu" and isinstance(self._accelerator, dist.ProcessGroup):
            return self._accelerator._get_backend(device)
        return self

    def supports_tensor_alloc(self, _: torch.device) -> bool:
        """FSDP asks whether buffers should come from the backend; they need not."""
        return False

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def _start_coalescing(self, device: torch.device) -> None:
        if torch.device(device).type == "cpu":
            self._coalesced = []
        elif isinstance(self._accelerator, dist.ProcessGroup):
            self._accelerator._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        """One work for all that was started in between, which torch has forgotten by now."""
        if torch.device(device).type != "cpu" and isinstance(self._accelerator, dist.ProcessGroup):
            return self._accelerator._end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None
        return joined(works, completer=self._completer)

    def _set_sequence_number_for_group(self) -> None:
        self._sequence_number = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence_number

    def _has_hooks(self) -> bool:
        return False


def _leave_groups() -> None:
    """Leave the groups that a program has not destroyed, as torch lets it; process sets before what is below them."""
    # What the interpreter has just printed as the reason of its end.
    failure: BaseException | None = getattr(sys, "last_value", None)
    for group in sorted(_open_groups, key=lambda group: not group._owns_communicator):
        with contextlib.suppress(CommunicatorError):
            group.leave(failure)


@contextmanager
def collective_errors(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise the error of a failed collective itself, where torch raises a ``RuntimeError`` that quotes it.

    ``DistributedDataParallel`` waits on c10d futures in C++, which keep only the text of an error. Around
    ``loss.backward()`` this gives, say, the ``RankLostError`` that the allreduce raised. Other errors pass.

    Args:
        group: the process group; the default group if None.

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
