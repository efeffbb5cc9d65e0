"""What users run during a fit, on every *rank*: the protocol of callbacks, and how they are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkdl.errors import TrainingError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from sparkdl.training.history import EpochRecord


class StopRequest:
    """Whether somebody on this rank has asked for the fit to end."""

    def __init__(self) -> None:
        self.is_made = False


@dataclass(frozen=True, kw_only=True)
class FitContext:
    """Where a fit stands, as a callback is told on its rank.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
        epochs: that the fit is to have.
        steps_per_epoch: on every rank.
        module: the model on this rank's device. Weights and buffers may be looked at; who changes them has to do it
            alike on all ranks.
        optimizer: of its parameters.
        epoch: number of the epoch, from 1; 0 before the first.
        step: number of the step in the epoch, from 1; 0 before the first.
        loss: mean loss of this rank's rows in the step, on the device: to ask for its value waits for a GPU. None
            outside of ``on_step_end``.
        record: of the epoch, with its metrics, the same on every rank; in ``on_fit_end`` of the last epoch. None
            elsewhere.
        model_epoch: in ``on_fit_end`` the epoch that the weights are from: the best one's are on rank 0 then.
    """

    rank: int
    world_size: int
    epochs: int
    steps_per_epoch: int
    module: nn.Module
    optimizer: Optimizer
    epoch: int = 0
    step: int = 0
    loss: Tensor | None = None
    record: EpochRecord | None = None
    model_epoch: int | None = None
    _request: StopRequest = field(default_factory=StopRequest, repr=False)

    def stop(self) -> None:
        """Ask for the fit to end after this epoch. One rank's wish is enough: all of them then stop together."""
        self._request.is_made = True


class Callback:
    """Base of callbacks: override what you need. ``TorchEstimator(callbacks=[...])`` takes instances.

    Each rank gets a copy of its own, made by pickling; what it remembers stays there and does not come back. All
    ranks call the same methods in the same order::

        on_fit_start
          on_epoch_start             epoch 1
            on_step_end              each batch, after the weights were updated if it led to an update
          on_epoch_end               after validation, with the record
        on_fit_end                   with the weights that the fit returns

    A method that raises ends the fit on all ranks, with the callback's name. A method that calls torch.distributed
    has to do so on all ranks. A fit that goes on from a checkpoint begins with ``on_fit_start`` again, and gives
    callbacks the states that they returned.
    """

    def on_fit_start(self, context: FitContext) -> None:
        """Before the first epoch."""

    def on_epoch_start(self, context: FitContext) -> None:
        """Before the first step of an epoch."""

    def on_step_end(self, context: FitContext) -> None:
        """After a step."""

    def on_epoch_end(self, context: FitContext) -> None:
        """After an epoch and its validation."""

    def on_fit_end(self, context: FitContext) -> None:
        """After the last epoch; not when the fit has failed."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint shall keep; it is rank 0's, for all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state_dict` returned."""


class Callbacks:
    """Calls callbacks in their order, and names one that fails.

    Args:
        callbacks: of this rank.
        settings: of the fit; see :class:`FitContext`.
    """

    def __init__(self, callbacks: Sequence[Callback], **settings: Any) -> None:
        self._callbacks = tuple(callbacks)
        self._settings = settings
        self._request = StopRequest()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._callbacks)

    @property
    def want_to_stop(self) -> bool:
        """Whether one of them has asked for the end of the fit on this rank."""
        return self._request.is_made

    @want_to_stop.setter
    def want_to_stop(self, wish: bool) -> None:
        self._request.is_made = wish

    def call(self, method: str, **where: Any) -> None:
        """Call a method of all callbacks.

        Raises:
            TrainingError: if one of them fails.
        """
        if not self._callbacks:
            return
        context = FitContext(**self._settings, **where, _request=self._request)
        for callback in self._callbacks:
            try:
                getattr(callback, method)(context)
            except Exception as error:
                at = f", epoch {context.epoch}" if context.epoch else ""
                at += f", step {context.step}" if context.step else ""
                raise TrainingError(
                    f"Callback {type(callback).__name__} failed in {method}{at} on rank {context.rank}: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all of them; what one has asked for is the rank's own."""
        return {"states": [callback.state_dict() for callback in self._callbacks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give back what :meth:`state_dict` returned; another number of callbacks begins anew."""
        if len(state["states"]) == len(self._callbacks):
            for callback, own in zip(self._callbacks, state["states"], strict=True):
                callback.load_state_dict(own)
