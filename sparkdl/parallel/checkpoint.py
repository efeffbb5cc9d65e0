"""``ShardedCheckpoints``: checkpoints of scripts that train models divided among ranks; any layout loads them.

:mod:`sparkdl.checkpoint` writes and reads them. This module adds the state of a script: random state, a scheduler, and
values of its own.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparkdl.checkpoint.folder import Checkpoint, CheckpointFolder
from sparkdl.checkpoint.tensors import Content, TrainingTensors, call_on_all_ranks
from sparkdl.checkpoint.values import copy_to_host
from sparkdl.checkpoint.writer import CheckpointWriter
from sparkdl.checks import check_counts
from sparkdl.data.files.lease import SoleLease, check_lease, hold_alone
from sparkdl.errors import CheckpointError, StoreError
from sparkdl.parallel.context import WholeSequences
from sparkdl.parallel.parallelism import DIMENSIONS
from sparkdl.parallel.sharding import list_modules
from sparkdl.random_state import random_state, rank_seed, seed_generators, set_random_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future
    from types import TracebackType

    from torch.optim import Optimizer

    from sparkdl.parallel.parallelism import RankLayout

_logger = logging.getLogger(__name__)

_KIND = "checkpoint"


class ShardedCheckpoints(AbstractContextManager["ShardedCheckpoints"]):
    """Saves and loads divided models, with optimizer, scheduler, random state and the position in the data.

    Use it as a context manager: it waits for the last checkpoint at the end. All ranks call its methods together::

        with ShardedCheckpoints("/shared/run-7", layout) as checkpoints:
            state = checkpoints.load(model, optimizer, scheduler) or {"step": 0}
            for step in range(state["step"], steps):
                ...
                if step % 500 == 499:
                    checkpoints.save(step + 1, model, optimizer, scheduler, state={"step": step + 1})

    It opens a process group of its own, so that a checkpoint can be written while training uses the other groups. From
    its first checkpoint to the end, rank 0 holds the folder alone; if a job on another machine held it and was killed,
    rank 0 first waits up to two minutes.

    Args:
        folder: path or URL that all ranks can reach, as a Store takes it.
        layout: layout of the ranks.
        num_kept: number of the newest checkpoints to keep.
        timeout_s: seconds that ranks wait for each other in these methods, and that :meth:`save` waits for the
            previous checkpoint. None for the timeout of the default process group if that is sparkdl's, else 1800.

    Raises:
        ParamError: if ``num_kept`` is not positive or the folder's name is empty.
        StoreError: if the folder's filesystem cannot be opened.
    """

    def __init__(
        self, folder: str, layout: RankLayout, *, num_kept: int = 2, timeout_s: float | None = None
    ) -> None:
        check_counts(least=1, num_kept=num_kept)
        self._holds = ExitStack()
        self._lease: SoleLease | None = None
        self._is_closed = False
        self._folder = CheckpointFolder(folder, _KIND, num_kept=num_kept, check=self._hold)
        self._layout = layout
        self._sizes = {name: layout.size(name) for name in DIMENSIONS}
        self._rank = dist.get_rank()
        self._device = torch.device(layout.mesh.device_type)
        self._writer = CheckpointWriter(
            self._folder,
            is_divided=True,
            timeout_s=timeout_s,
            advice="Save less often, choose a faster store, or give ShardedCheckpoints a larger timeout_s.",
        )

    def save(
        self,
        step: int,
        module: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        *,
        state: Mapping[str, Any] | None = None,
    ) -> Future[None]:
        """Copy the state to host memory, and write it in a thread while training continues. Collective.

        The call waits for the previous checkpoint, so that at most one copy is in memory. Where ranks hold the same
        part of the model and a buffer of it differs between them, the value of one of these ranks is saved.

        Args:
            step: number of completed steps, the same on all ranks.
            module: this rank's part of the model; with a pipeline, the stages of this rank.
            optimizer: optimizer of the parameters of ``module``; None if there is none to save.
            scheduler: anything with a ``state_dict``, the same on all ranks; None if there is none to save.
            state: further values to save, the same on all ranks: numbers, strings, tensors, and lists and dicts of
                them.

        Returns:
            A future that is done when the checkpoint is complete; it holds the error if writing failed.

        Raises:
            CheckpointError: if a value cannot be stored in a checkpoint.
            StoreError: if the previous checkpoint could not be written, or not in time.
            CheckpointsInUseError: if another job uses the folder, as found when the previous checkpoint was written.
        """
        self._writer.wait()
        part = TrainingTensors(_unwrap(module), optimizer, is_divided=True)
        copies = part.copy()
        of_rank = {"random": random_state(self._device)}
        shared = {
            "training": copies.values,
            "state": copy_to_host(dict(state or {}), "the state given to save()"),
            "scheduler": scheduler and copy_to_host(scheduler.state_dict(), "the scheduler given to save()"),
        }
        return self._writer.write(
            Content(
                label=f"step-{step:08d}",
                tensors=copies.tensors,
                state={**copy_to_host(of_rank, "the random state"), **(shared if self._rank == 0 else {})},
                groups=part.groups(),
                about={"step": step, "sizes": self._sizes},
                rank_about={"reader": self._layout.row_reader[0]},
            )
        )

    def load(
        self,
        module: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        *,
        step: int | None = None,
    ) -> dict[str, Any] | None:
        """Load the newest intact checkpoint, written in any layout. Collective.

        Before anything is overwritten, the files are compared with their checksums, and the model with the model of
        the checkpoint. Damaged checkpoints are skipped with a warning, unless ``step`` asks for one.

        In the same layout, each rank continues with its own random state. In another layout, each rank takes the random
        state of a rank that read the same share of the rows; ranks whose share did not exist are seeded again.

        Args:
            module: this rank's part of the model, as for :meth:`save`; its tensors are overwritten in place.
            optimizer: optimizer of the parameters of ``module``; None to leave the saved state of the optimizer out.
            scheduler: scheduler as for :meth:`save`; None to leave its saved state out.
            step: step whose newest checkpoint is loaded; the newest checkpoint of all if None.

        Returns:
            The ``state`` given to :meth:`save`, or ``{}`` if none was given; None if the folder holds no intact
            checkpoint.

        Raises:
            CheckpointError: if the checkpoint is of another model or optimizer, the one of ``step`` is damaged, or
                there is none of that step.
            ParamError: if the module has tensors on the meta device.
            StoreError: if the folder cannot be read.
        """
        self._writer.wait()
        group = self._writer.group
        on_all_ranks = partial(call_on_all_ranks, group=group)
        share = self._rank, dist.get_world_size()
        if step is None:
            checkpoint = self._folder.newest(share=share, on_all_ranks=on_all_ranks)
        else:
            of_step, *_ = on_all_ranks(lambda: _open_step(self._folder, step) if self._rank == 0 else None)
            assert of_step is not None, "what rank 0 has opened"
            on_all_ranks(lambda: of_step.check(*share))
            checkpoint = of_step
        if checkpoint is None:
            return None
        part = TrainingTensors(_unwrap(module), optimizer, is_divided=True)
        part.check(checkpoint, group)
        readers = [rank["reader"] for rank in checkpoint.manifest.ranks]
        is_same_layout = checkpoint.manifest.about["sizes"] == self._sizes
        reader = self._layout.row_reader[0]
        source = self._rank if is_same_layout else readers.index(reader % (max(readers) + 1))
        states: list[dict[str, Any]] = []

        def read_states() -> None:
            states[:] = checkpoint.load_state(0), checkpoint.load_state(source)
            part.check_optimizer(states[0]["training"], checkpoint.url)
            if scheduler is not None and states[0]["scheduler"] is None:
                raise CheckpointError(
                    f"The checkpoint {checkpoint.url} has no state of the scheduler, as none was given to save(). "
                    "Call load() without it."
                )

        on_all_ranks(read_states)
        shared, of_rank = states
        part.load(checkpoint, shared["training"], group)
        if scheduler is not None:
            scheduler.load_state_dict(shared["scheduler"])
        set_random_state(of_rank["random"], self._device)
        if not is_same_layout and reader not in readers:
            seed_generators(rank_seed(int(torch.randint(2**62, (), device="cpu")), reader))
        state: dict[str, Any] = shared["state"]
        return state

    def steps(self) -> list[int]:
        """Return the step of each complete checkpoint in the folder, the oldest checkpoint first.

        Raises:
            StoreError: if the folder cannot be listed.
        """
        return [_step_of(name) for name in self._folder.names() if self._folder.is_complete(name)]

    def wait(self) -> None:
        """Wait until the checkpoint of the last :meth:`save` is written.

        Raises:
            StoreError: if it could not be written, or not in time.
            CommunicatorError: if a rank has failed, or has not called :meth:`save` in time; the message names it. With
                a backend of torch, an error of torch that may not name it.
        """
        self._writer.wait()

    def close(self) -> None:
        """Wait for the last checkpoint, and end the thread and the process group. Collective.

        Raises:
            StoreError: if the checkpoint could not be written, or not in time.
        """
        try:
            with self._holds:
                self._writer.close()
        finally:
            self._is_closed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._writer.__exit__(kind, error, trace)
        finally:
            self._is_closed = True
            self._holds.__exit__(kind, error, trace)

    def _hold(self) -> None:
        """Begin to hold the folder alone, on the thread of rank 0 that writes; later, check that this is still so."""
        url = self._folder.url
        if self._lease is None and not self._is_closed:
            self._lease = self._holds.enter_context(
                hold_alone(url, _logger.warning, user="job", setting="folder")
            )
        if self._lease is None or self._is_closed:
            self._holds.close()
            raise StoreError(f"A checkpoint in {url} was given up, as it was not written before the end.")
        self._lease.check()
        check_lease(url, self._lease.name, user="job", setting="folder")


def _open_step(folder: CheckpointFolder, step: int) -> Checkpoint:
    """Open the newest checkpoint of a step."""
    names = list(filter(folder.is_complete, folder.names()))
    for name in reversed(names):
        if _step_of(name) == step:
            return folder.open(name)
    steps = ", ".join(str(_step_of(name)) for name in names) or "no step"
    raise CheckpointError(f"{folder.url} has no checkpoint of step {step}; it has those of {steps}.")


def _step_of(name: str) -> int:
    return int(name.split("-")[-2])


def _unwrap(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The modules inside of wrappers whose tensors have other names than in the whole model."""
    modules = list_modules(module)
    for index, part in enumerate(modules):
        while isinstance(part, DistributedDataParallel | WholeSequences):
            part = part.module  # noqa: PLW2901 - the module inside
        modules[index] = part
    return modules
