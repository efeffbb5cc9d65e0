"""Ranks with a GPU each that communicate by NCCL. Runs on ranks.

Knows no torch: arrays are in GPU memory and say so themselves, streams are integers. What NCCL does not say, the
communicator below does: who died, who aborted and why.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from sparkdl.collective.nccl_batch import NcclBatch
from sparkdl.collective.nccl_watch import NcclWatch
from sparkdl.errors import CommunicatorError, CommunicatorTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from sparkdl._native import NcclCommunicator, NcclOperation
    from sparkdl.collective.communicator import Communicator
    from sparkdl.collective.device_array import DeviceArray


class NcclHandle:
    """Operations that were put on a stream. It keeps their arrays as long as it lives itself."""

    def __init__(self, group: NcclGroup, number: int, arrays: Sequence[DeviceArray]) -> None:
        self._group = group
        self._number = number
        self._arrays = arrays

    def wait(self, timeout_s: float | None = None) -> None:
        """Block the host until the GPU has done them; what comes after them on their stream waits by itself.

        Args:
            timeout_s: seconds to wait at most; the operations' own deadline when None.

        Raises:
            CommunicatorTimeoutError: if they are not done by then; they go on and can be waited for again.
            CommunicatorError: what the group has failed with.
        """
        self._group.wait(self._number, timeout_s)

    def done(self) -> bool:
        """Whether the GPU has done them.

        Raises:
            CommunicatorError: what the group has failed with.
        """
        return self._group.is_done(self._number)


class NcclGroup:
    """An open NCCL communicator; made by :func:`~sparkdl.collective.nccl_opening.open_nccl_group`.

    It shares the fate of the communicator below: when one of them fails, the other is aborted, on all ranks. A
    context manager: closes on success, aborts on exception. NCCL wants the same operations in the same order on all
    ranks and checks none of it.

    Attributes:
        communicator: the communicator below, of the same ranks.
        gpu: number of this rank's GPU in this process.
        name: what the group is called in messages.
        timeout_s: by when operations must be complete, in seconds, unless they say otherwise.
    """

    def __init__(
        self,
        core: NcclCommunicator,
        communicator: Communicator,
        *,
        gpu: int,
        name: str,
        timeout_s: float,
        owns_communicator: bool = False,
    ) -> None:
        self._core = core
        self.communicator = communicator
        self.gpu = gpu
        self.name = name
        self.timeout_s = timeout_s
        self._owns_communicator = owns_communicator
        self._watch = NcclWatch(core, communicator, name)
        self._closed = False

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.communicator.world_size

    @property
    def failure(self) -> str | None:
        """Why the group cannot be used any more; None as long as it can."""
        return self.communicator.failure or self._core.failure

    def check(self) -> None:
        """Return at once, unless the group has failed.

        Raises:
            CommunicatorError: what it has failed with; the subclass says how.
        """
        self.is_done(0)

    def error(self) -> CommunicatorError | None:
        """What :meth:`check` raises, or None."""
        try:
            self.check()
        except CommunicatorError as error:
            return error
        return None

    def batch(self) -> NcclBatch:
        """An empty batch of operations."""
        return NcclBatch(self)

    def run(
        self,
        operations: Sequence[NcclOperation],
        arrays: Sequence[DeviceArray],
        *,
        stream: int,
        timeout_s: float | None = None,
    ) -> NcclHandle:
        """What :meth:`NcclBatch.run` does; nothing happens if there are no operations."""
        with self._errors():
            number = 0
            if operations:
                number = self._core.run(operations, stream, timeout_s or self.timeout_s)
                self._watch.note_start()
        return NcclHandle(self, number, arrays)

    def is_done(self, number: int) -> bool:
        """Whether the GPU has done what has this number, and everything before it."""
        with self._errors():
            return self._core.done(number)

    def wait(self, number: int, timeout_s: float | None) -> None:
        """Block the host until :meth:`is_done`."""
        with self._errors():
            self._core.wait(number, self.timeout_s if timeout_s is None else timeout_s)

    def split(self, ranks: Sequence[int], name: str) -> NcclGroup | None:
        """Open a process set by ``ncclCommSplit``. All ranks of the group make this call, with the same arguments.

        Args:
            ranks: the members; their order gives their ranks in the process set.
            name: distinguishes process sets.

        Returns:
            The process set, to be closed by the caller; None on a rank that is not in it.

        Raises:
            ParamError: if ``ranks`` cannot be a process set.
            CommunicatorError: if it cannot be opened; the group is of no further use then.
        """
        communicator = self.communicator.split(ranks, name)
        full_name = f"{self.name}/{name}"
        try:
            core = self._split_core(list(ranks), full_name)
        except BaseException:
            communicator.close()
            raise
        if core is None:
            return None
        return NcclGroup(
            core,
            communicator,
            gpu=self.gpu,
            name=full_name,
            timeout_s=self.timeout_s,
            owns_communicator=True,
        )

    def _split_core(self, members: list[int], name: str) -> NcclCommunicator | None:
        is_member = self.rank in members
        rank = members.index(self.rank) if is_member else 0
        with self._errors():
            core = self._core.split(
                0 if is_member else None,
                rank,
                rank=rank,
                world_size=len(members),
                name=name,
                timeout_s=self.timeout_s,
            )
            if not (core or self._core).wait_ready(self.timeout_s):
                late = f"{name!r} was not split off within {self.timeout_s:g} s"
                self._core.abort(late)
                raise CommunicatorTimeoutError(f"{late}: all ranks of {self.name!r} must take part")
            return core

    def abort(self, reason: str) -> None:
        """Make every operation fail with ``reason``, here and on all peers; returns at once."""
        self._core.abort(f"rank {self.rank} aborted: {reason}")
        self.communicator.abort(reason)

    def close(self) -> None:
        """Wait for what is under way and leave. May be called again."""
        if self._closed:
            return
        self._closed = True
        try:
            self._core.close()
        except CommunicatorError:
            # The loss of a rank is told by the operation that it broke, and may reach NCCL's side only now.
            if self.communicator.failure is None:
                raise
        finally:
            self._watch.close()
            if self._owns_communicator:
                self.communicator.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise what the communicator knows in place of what NCCL says."""
        self._watch.check()
        try:
            yield
        except CommunicatorError as error:
            if self._core.failure is None or self._closed:
                raise
            raise self._watch.explain(error) from error

    def __enter__(self) -> NcclGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.failure is None:
            self.abort(f"rank {self.rank} failed: {type(error).__name__}: {error}")
        self.close()
