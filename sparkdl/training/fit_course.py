"""What happens around the epochs of a fit: callbacks, the best weights, and whether it goes on. Runs on a *rank*."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.training.best_weights import BestWeights
from sparkdl.training.callbacks import Callbacks
from sparkdl.training.early_stopping import EarlyStopping

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from sparkdl.collective import Communicator
    from sparkdl.training.history import EpochRecord
    from sparkdl.training.spec import TrainingSpec


class FitCourse:
    """The course of a fit, which all ranks follow together.

    Args:
        spec: of the fit.
        communicator: open over all ranks.
        module: that is trained.
        optimizer: of its parameters.
        steps_per_epoch: on every rank.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        *,
        communicator: Communicator,
        module: nn.Module,
        optimizer: Optimizer,
        steps_per_epoch: int,
    ) -> None:
        self._communicator = communicator
        self._callbacks = Callbacks(
            spec.callbacks,
            rank=communicator.rank,
            world_size=communicator.world_size,
            epochs=spec.epochs,
            steps_per_epoch=steps_per_epoch,
            module=module,
            optimizer=optimizer,
        )
        self._best: BestWeights | None = None
        if spec.best is not None:
            self._best = BestWeights(spec.best, module, is_keeper=communicator.rank == 0)
        self._stopping: EarlyStopping | None = None
        if spec.patience is not None:
            assert spec.watched is not None, "patience is for something"
            self._stopping = EarlyStopping(spec.watched, spec.patience)
        self._last: EpochRecord | None = None
        self._has_ended = False

    @property
    def goes_on(self) -> bool:
        """Whether there is to be another epoch; all ranks agree."""
        return not self._has_ended

    @property
    def best_epoch(self) -> int | None:
        """The best epoch so far, where the best weights are kept."""
        return None if self._best is None else self._best.epoch

    @property
    def wants_to_stop(self) -> bool:
        """Whether a callback has asked for the end of the fit on this rank, which is what one of them needs."""
        return self._callbacks.want_to_stop

    @wants_to_stop.setter
    def wants_to_stop(self, wish: bool) -> None:
        self._callbacks.want_to_stop = wish

    def begin(self, history: Sequence[EpochRecord] = (), *, in_epoch: bool = False) -> None:
        """Begin the fit, or go on after the epochs of a history. Collective where a fit may end early.

        Args:
            history: records of the epochs that are done.
            in_epoch: whether the next one is under way, at whose end wishes to stop count.
        """
        if history:
            self._last = history[-1]
            self._has_ended = not in_epoch and self._agreed_to_stop()
        self._callbacks.call("on_fit_start")

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, counted from 1."""
        self._callbacks.call("on_epoch_start", epoch=epoch)

    def end_step(self, epoch: int, step: int, loss: Tensor) -> None:
        """A step is done, counted from 1."""
        self._callbacks.call("on_step_end", epoch=epoch, step=step, loss=loss)

    def end_epoch(self, record: EpochRecord) -> None:
        """An epoch is done, and validated. Collective where a fit may end early."""
        self._last = record
        if self._best is not None:
            self._best.offer(record)
        self._callbacks.call("on_epoch_end", epoch=record.epoch, record=record)
        if self._stopping is not None:
            self._stopping.observe(record)
        self._has_ended = self._agreed_to_stop()

    def end(self) -> int:
        """End the fit, with the best weights where they are kept; return the epoch that rank 0's weights are from."""
        assert self._last is not None, "a fit has an epoch"
        best = None if self._best is None else self._best.restore()
        epoch = self._last.epoch if best is None else best
        self._callbacks.call("on_fit_end", epoch=self._last.epoch, record=self._last, model_epoch=epoch)
        return epoch

    def _agreed_to_stop(self) -> bool:
        """Whether any rank wants to stop: all of them then do, whatever rounding made of their numbers."""
        if not self._callbacks and self._stopping is None:
            return False
        wish = self._callbacks.want_to_stop or (self._stopping is not None and self._stopping.is_over)
        wishes = np.array([wish], np.int64)
        if self._communicator.world_size > 1:
            self._communicator.allreduce(wishes, op="max")
        return bool(wishes[0])

    def state_dict(self) -> dict[str, Any]:
        """Return all that the further course hangs on; rank 0's is for every rank."""
        parts = {"best": self._best, "stopping": self._stopping, "callbacks": self._callbacks}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state_dict` returned on rank 0; what it does not tell of begins anew."""
        parts = {"best": self._best, "stopping": self._stopping, "callbacks": self._callbacks}
        for name, part in parts.items():
            if part is not None and name in state:
                part.load_state_dict(state[name])
