"""Updates that each rank makes of its own weights, and the synchronizations of the ranks now and then.

:class:`LocalUpdates` carries out :class:`~sparkdl.slow_links.LocalSGD` and :class:`~sparkdl.slow_links.DiLoCo`. Local
SGD is DiLoCo whose outer optimizer adds the average progress of the ranks to the weights: with learning rate 1, and
without momentum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparkdl.collective.current import communicator_for
from sparkdl.slow_links import DiLoCo, LocalSGD
from sparkdl.torch.data_parallel import broadcast_tensors, check_trainable
from sparkdl.torch.replicas import LiveParameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sparkdl.collective import Communicator, Handle


class _OuterWeights:
    """The weights of the last synchronization of some parameters, flat and on the host, equal on all ranks.

    Attributes:
        parameters: the parameters.
        weights: their weights.
        velocity: momentum of the outer optimizer; None without momentum.
        base: this rank's weights when its progress was sent that is being averaged; None unless one is.
        sent: memory of the progress that is averaged.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, *, has_momentum: bool) -> None:
        self.parameters = list(parameters)
        self._numbers = [_real(parameter).numel() for parameter in self.parameters]
        self.weights = torch.empty(sum(self._numbers), dtype=dtype)
        self.velocity = torch.zeros_like(self.weights) if has_momentum else None
        self.base: Tensor | None = None
        self.sent = torch.empty_like(self.weights)
        self.read(self.weights)

    def read(self, out: Tensor) -> Tensor:
        """Copy this rank's weights into ``out``."""
        for parameter, part in zip(self.parameters, out.split(self._numbers), strict=True):
            values = _real(parameter)
            part.view(values.shape).copy_(values)
        return out

    def write(self, values: Tensor) -> None:
        """Overwrite this rank's weights."""
        for parameter, part in zip(self.parameters, values.split(self._numbers), strict=True):
            target = _real(parameter)
            target.copy_(part.view(target.shape))

    def views(self, flat: Tensor) -> Iterable[tuple[nn.Parameter, Tensor]]:
        """The part of each parameter in a tensor like ``weights``."""
        return zip(self.parameters, flat.split(self._numbers), strict=True)

    def start(self, communicator: Communicator) -> Handle:
        """Begin to average the progress of the ranks since the last synchronization. Collective."""
        torch.sub(self.weights, self.read(self.sent), out=self.sent)
        return communicator.allreduce_async(self.sent, op="avg", name="outer gradient")

    def take_step(self, learning_rate: float, momentum: float) -> None:
        """Make a step of the outer optimizer with the average that ``sent`` holds."""
        gradient = self.sent
        if self.velocity is not None:
            self.velocity.mul_(momentum).add_(gradient)
            gradient = gradient.add_(self.velocity, alpha=momentum)  # of Nesterov
        self.weights.sub_(gradient, alpha=learning_rate)


def _real(parameter: nn.Parameter) -> Tensor:
    values = parameter.detach()
    return torch.view_as_real(values) if values.is_complex() else values


def _outer_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Weights of 16 bits have outer weights of float32, to which small steps add up."""
    return torch.float64 if parameter.dtype in (torch.float64, torch.complex128) else torch.float32


_AVERAGE = DiLoCo(every=1, learning_rate=1.0, momentum=0.0)
"""The outer optimizer of local SGD."""


class LocalUpdates:
    """Local updates of a module's weights, and the synchronizations of the ranks after every few of them.

    A module that is not wrapped is trained on each rank's own gradients::

        local = LocalUpdates(model, DiLoCo(every=32, overlap=True))
        for batch in batches:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            local.after_step()
        local.synchronize()

    The constructor broadcasts rank 0's parameters and buffers. After a synchronization all ranks have the same weights,
    to the bit, and rank 0's buffers. The state of the inner optimizer stays each rank's own. Before the
    ``begin_after``-th update, and with ``group="host"``, the caller averages gradients, by a
    :class:`~sparkdl.torch.DataParallel` of all ranks or of :attr:`group`.

    Args:
        module: module that is trained, with the same architecture on all ranks.
        settings: when the ranks synchronize, and how.
        communicator: communicator of the ranks; None for the current one. Progress in float32 is sent in its ``wire``.

    Attributes:
        settings: the settings.
        group: communicator of the ranks that average their gradients in each step; None if this rank is alone.

    Raises:
        LaunchError: if there is no communicator.
        ParamError: if a parameter cannot be averaged.
    """

    def __init__(
        self, module: nn.Module, settings: LocalSGD | DiLoCo, communicator: Communicator | None = None
    ) -> None:
        communicator = communicator_for(type(self).__name__, communicator)
        self._module, self.settings, self._communicator = module, settings, communicator
        outer = settings if isinstance(settings, DiLoCo) else _AVERAGE
        self._learning_rate, self._momentum, self._overlaps = (
            outer.learning_rate,
            outer.momentum,
            outer.overlap,
        )
        self._has_effect = communicator.world_size > 1 or outer is settings
        self.group = _open_group(settings, communicator)
        self._num_updates = 0
        self._num_since = 0
        """Number of local updates since the last synchronization, or since the last progress was sent."""
        self._pending: list[Handle] = []
        self._parts: list[_OuterWeights] = []
        self._loaded: dict[str, dict[nn.Parameter, Tensor]] = {"weights": {}, "velocities": {}}
        """What :meth:`begin` takes over from :meth:`load_state_dict`."""
        self._live = LiveParameters(module)
        self._known = set(self._live.parameters)
        check_trainable(module)
        if communicator.world_size > 1:
            broadcast_tensors([*self._live.parameters, *self._live.buffers()], communicator)
        self.begin()

    @property
    def is_local(self) -> bool:
        """Whether the next update is made of this rank's gradients, or of those of its :attr:`group`."""
        return self._num_updates >= self.settings.begin_after

    def begin(self) -> None:
        """Take the weights that the module has now as those of the last synchronization; they are equal on all ranks.

        The constructor calls this; call it again after the weights of a checkpoint are loaded.
        """
        self._num_since = 0
        if self.is_local and self._has_effect:
            self._lay_out()

    def take_up_changes(self) -> None:
        """Take up parameters that were added, frozen or unfrozen since the last step. Collective if there are any.

        Call this before the forward pass if the module may have changed, equally on all ranks.
        """
        if not self._live.look():
            return
        new = [parameter for parameter in self._live.parameters if parameter not in self._known]
        self._known = set(self._live.parameters)
        check_trainable(self._module)
        if self._communicator.world_size > 1:
            broadcast_tensors(new, self._communicator, name="new parameters of the module")
        if self._parts:
            self._take_pending()
            self._lay_out()

    def after_step(self, *, ends: bool = False, waits: bool = False) -> bool:
        """Count an update of the weights, and synchronize if it is time. All ranks call it after each update.

        Args:
            ends: whether to synchronize in any case, as at the end of an epoch.
            waits: whether to wait for the average if it is time, although reductions overlap with the next updates.

        Returns:
            Whether all ranks have the same weights now.
        """
        was_local = self.is_local
        self._num_updates += 1
        if not was_local:
            self.begin()
            return True
        self._num_since += 1
        if ends:
            self.synchronize()
            return True
        if self._num_since < self.settings.every:
            return False
        if waits or not self._overlaps:
            self.synchronize()
            return True
        self._take_pending()
        self._send_progress()
        for part in self._parts:
            part.base = part.read(torch.empty_like(part.weights))
        return False

    def synchronize(self) -> None:
        """Give all ranks the same weights and buffers now. Collective."""
        self._take_pending()
        if self._num_since:
            self._send_progress()
            self._take_pending()
        if self._communicator.world_size > 1:
            broadcast_tensors(self._live.buffers(), self._communicator, name="buffers of the module")

    def close(self) -> None:
        """Close the communicator of :attr:`group`."""
        if self.group is not None:
            self.group.close()

    def _send_progress(self) -> None:
        self._num_since = 0
        with torch.no_grad():
            self._pending = [part.start(self._communicator) for part in self._parts]

    def _take_pending(self) -> None:
        """Make the outer step of the progress that was sent; this rank keeps its own progress since then."""
        for handle in self._pending:
            handle.wait()
        with torch.no_grad():
            for part in self._parts if self._pending else ():
                part.take_step(self._learning_rate, self._momentum)
                if part.base is None:
                    part.write(part.weights)
                else:
                    own = part.read(torch.empty_like(part.weights)).sub_(part.base)
                    part.write(own.add_(part.weights))
                    part.base = None
        self._pending = []

    def _lay_out(self) -> None:
        """Make outer weights of parameters that require gradients now or did before; keep those that exist."""
        before, velocities = self._loaded["weights"], self._loaded["velocities"]
        is_trained = {parameter for part in self._parts for parameter in part.parameters}
        for part in self._parts:
            if self._num_since:
                before = {**before, **dict(part.views(part.weights))}
            if part.velocity is not None:
                velocities = {**velocities, **dict(part.views(part.velocity))}
        self._loaded = {"weights": {}, "velocities": {}}
        trained = [
            parameter
            for parameter in self._live.parameters
            if parameter.requires_grad or parameter in is_trained
        ]
        self._parts = []
        for dtype in dict.fromkeys(map(_outer_dtype, trained)):
            alike = [parameter for parameter in trained if _outer_dtype(parameter) == dtype]
            part = _OuterWeights(alike, dtype, has_momentum=self._momentum > 0)
            self._parts.append(part)
            _take_over(part.views(part.weights), before)
            if part.velocity is not None:
                _take_over(part.views(part.velocity), velocities)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, the same on all ranks; valid only at a synchronization."""
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        weights, velocities = {}, {}
        for part in self._parts:
            rounded = [
                (parameter, values)
                for parameter, values in part.views(part.weights)
                # Their outer weights are more precise.
                if parameter.dtype in (torch.bfloat16, torch.float16)
            ]
            weights.update({names[parameter]: values for parameter, values in rounded})
            if part.velocity is not None:
                velocities.update(
                    {names[parameter]: values for parameter, values in part.views(part.velocity)}
                )
        return {"num_updates": self._num_updates, "weights": weights, "velocities": velocities}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; call :meth:`begin` once the module's weights are loaded."""
        parameters = dict(self._module.named_parameters())
        self._num_updates = state["num_updates"]
        self._parts = []
        self._loaded = {
            kind: {parameters[name]: values.clone() for name, values in state[kind].items()}
            for kind in self._loaded
        }


def _take_over(views: Iterable[tuple[nn.Parameter, Tensor]], values: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, view in views:
        if parameter in values:
            view.copy_(values[parameter])


def _open_group(settings: LocalSGD | DiLoCo, communicator: Communicator) -> Communicator | None:
    """Open the communicator of the ranks that average gradients with this one; None if there are no others."""
    if settings.group == "rank":
        return None
    hosts = communicator.topology.host_of_rank
    ranks = [rank for rank, host in enumerate(hosts) if host == hosts[communicator.rank]]
    return communicator.split(ranks, "ranks of a host") if len(ranks) > 1 else None
