"""Horovod's elastic states, on :class:`sparkdl.runner.TrainingState`.

If a Runner restarts ranks, their commits are stored. Without such a launcher they stay in memory and are lost with the
ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sparkdl.checkpoint.commit_place import CommitPlace
from sparkdl.checkpoint.parts import Part, StateDictPart
from sparkdl.checkpoint.training_state import Ranks, TrainingState, are_to_leave
from sparkdl.collective.current import provided
from sparkdl.horovod.torch.basics import rank, size
from sparkdl.horovod.torch.elastic.sampler import ElasticSampler
from sparkdl.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from sparkdl.horovod.torch.names import HostsUpdatedInterrupt

logger = logging.getLogger(__name__)


class State:
    """Variables of a training, remembered as they were at the last commit. Subclasses define which variables.

    Args:
        bcast_object: function that returns rank 0's object on all ranks.
        get_rank: function that returns the number of this rank.
    """

    _num_commits = 0

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        # Horovod's names, which subclasses of users rely on.
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Register functions to call whenever the ranks begin again."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Reset the state and call the callbacks, after the ranks have begun again."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Remember the variables as they are now."""
        self.save()
        self._keep()
        self._num_commits += 1
        self.check_host_updates()

    def _keep(self) -> None:
        if CommitPlace.provided is not None and self._rank() == 0:
            logger.warning(
                "The commits of a %s are lost with the ranks: only those of an ObjectState or TorchState outlive them.",
                type(self).__name__,
            )

    def take_up_commit(self) -> bool:
        """Return False: there is no commit of ranks before these."""
        return False

    def _sharded_parts(self) -> list[str]:
        return []

    def _agree_on_commits(self) -> None:
        """In an elastic run, count the commits of rank 0, whose state all ranks have now. Collective."""
        if provided.worlds is not None:
            self._num_commits = int(self._bcast_object(self._num_commits))

    def check_host_updates(self) -> None:
        """Interrupt the training if the run is elastic, and ranks wait to join; all ranks call this. Collective.

        Raises:
            HostsUpdatedInterrupt: on all ranks, if so.
        """
        if are_to_leave(self._bcast_object):
            raise HostsUpdatedInterrupt(skip_sync=False)

    def save(self) -> None:
        """Remember the variables as they are now, on this rank."""
        raise NotImplementedError

    def restore(self) -> None:
        """Set the variables to the remembered values."""
        raise NotImplementedError

    def sync(self) -> None:
        """Set the variables of all ranks to rank 0's, and remember them."""
        raise NotImplementedError

    def reset(self) -> None:
        """Hook for subclasses, called when the ranks begin again."""


class ObjectState(TrainingState, State):
    """Python objects, each an attribute of the state."""

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        """Set the keyword arguments as attributes."""
        State.__init__(self, bcast_object, get_rank)
        self._set_up(Ranks(get_rank, size, bcast_object), self._make_handlers(kwargs), kwargs)

    def _make_handlers(self, parts: dict[str, Any]) -> dict[str, Part]:
        """Take the parts that are not kept as objects out of ``parts``, and return their handlers."""
        del parts
        return {}

    def _sync_part(self, part: Any) -> None:
        part.sync()

    def _leave_if_asked(self) -> None:
        self.check_host_updates()


class TorchState(ObjectState):
    """The state of a training; each part is an attribute.

    Modules sharded by FSDP2 or tensor parallelism, pipeline stages of :func:`sparkdl.parallel.cut`, and the optimizers
    of both may be parts of it: each rank keeps its own piece of these. ``sync`` does not change them, so give the ranks
    the same weights before.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        """Take the parts of the state.

        Args:
            model: model, or None.
            optimizer: optimizer of the model, or None.
            kwargs: further modules, optimizers and samplers, kept by their ``state_dict``; any other value is kept as
                a Python object.

        Raises:
            ParamError: if a part is sharded by FSDP1.
        """
        super().__init__(broadcast_object, rank, model=model, optimizer=optimizer, **kwargs)

    def _make_handlers(self, parts: dict[str, Any]) -> dict[str, Part]:
        handlers = {}
        for name, value in list(parts.items()):
            handler = next((make(value) for kind, make in _handlers if isinstance(value, kind)), None)
            if handler is not None:
                handlers[name] = handler
                del parts[name]
        return handlers


class StateHandler(Part):
    """Keeps one part of a state; subclass it for further types of parts, see :func:`set_handler_registry`."""

    def sync(self) -> None:
        """Set the part of all ranks to rank 0's, and remember it."""
        raise NotImplementedError


class ModelStateHandler(StateDictPart, StateHandler):
    """Keeps a ``torch.nn.Module``."""

    def sync(self) -> None:
        """See :class:`StateHandler`."""
        if not self.is_sharded:
            broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateDictPart, StateHandler):
    """Keeps a ``torch.optim.Optimizer``."""

    def sync(self) -> None:
        """See :class:`StateHandler`."""
        if not self.is_sharded:
            broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateDictPart, StateHandler):
    """Keeps an :class:`ElasticSampler`."""

    def sync(self) -> None:
        """See :class:`StateHandler`."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


_handlers: list[tuple[type, type[Any]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[Any]]]:
    """The types of parts and their handlers; the first type that matches a part is used."""
    return _handlers


def set_handler_registry(registry: list[tuple[type, type[Any]]]) -> None:
    """Replace the registry that :func:`get_handler_registry` returns."""
    global _handlers  # noqa: PLW0603  # what get_handler_registry gave must stay, as a program may set it again
    _handlers = registry
