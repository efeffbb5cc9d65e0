"""``hvd.elastic.TorchState``: models, optimizers, samplers and Python objects that are committed together."""

from __future__ import annotations

from typing import Any

import torch

from sparkdl.horovod.torch.basics import rank
from sparkdl.horovod.torch.elastic.object_state import ObjectState
from sparkdl.horovod.torch.elastic.sampler import ElasticSampler
from sparkdl.horovod.torch.elastic.shards import copy_state, holds_shards, load_state, refuse_other_shards
from sparkdl.horovod.torch.objects import broadcast_object
from sparkdl.horovod.torch.optimizer_state import broadcast_optimizer_state
from sparkdl.horovod.torch.parameter_values import broadcast_parameters


class TorchState(ObjectState):
    """The state of a training; each part is an attribute.

    Modules that FSDP2 or tensor parallelism have sharded, and their optimizers, may be parts of it: of these each rank
    keeps what it has. ``sync`` leaves them as they are, so give the ranks the same weights before.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        """Take the parts of the state.

        Args:
            model: the model, if there is one.
            optimizer: its optimizer.
            kwargs: further modules, optimizers and samplers, kept by their ``state_dict``; anything else is kept as
                a Python object.

        Raises:
            ParamError: if a part is sharded otherwise, by FSDP1.
        """
        parts = {"model": model, "optimizer": optimizer, **kwargs}
        found = {name: make_handler(value) for name, value in parts.items()}
        self._handlers = {name: handler for name, handler in found.items() if handler is not None}
        for name, handler in self._handlers.items():
            setattr(self, name, handler.value)
        objects = {name: value for name, value in parts.items() if name not in self._handlers}
        super().__init__(broadcast_object, rank, **objects)

    def save(self) -> None:
        """Remember all parts as they are now, on this rank."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Set all parts to what was remembered."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Set the parts of all ranks to rank 0's, and remember them."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def _committed(self) -> dict[str, dict[str, Any]] | None:
        objects = super()._committed() or {}
        return {**objects, "parts": {name: handler.committed() for name, handler in self._handlers.items()}}

    def _sharded_parts(self) -> list[str]:
        return [name for name, handler in self._handlers.items() if handler.is_sharded]

    def _set_committed(self, contents: dict[str, dict[str, Any]]) -> None:
        self._set_committed_parts(contents["parts"])
        super()._set_committed(contents)

    def _set_committed_parts(self, parts: dict[str, Any]) -> None:
        for name, committed in parts.items():
            self._handlers[name].set_committed(committed)
            super().__setattr__(name, self._handlers[name].value)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, name) and name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


class StateHandler:
    """Keeps one part of a state; subclass it for a kind of your own, see :func:`set_handler_registry`.

    Attributes:
        value: the part.
        is_sharded: whether each rank keeps a piece of it, and rank 0's is not that of the others.
    """

    is_sharded: bool = False

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Remember the part as it is now."""
        raise NotImplementedError

    def restore(self) -> None:
        """Set the part to what was remembered."""
        raise NotImplementedError

    def sync(self) -> None:
        """Set the part of all ranks to rank 0's, and remember it."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Keep another part from now on."""
        self.value = value
        self.save()

    def committed(self) -> Any:
        """What was remembered last, for a file; the part itself unless a subclass knows better."""
        return self.value

    def set_committed(self, committed: Any) -> None:
        """Remember what :meth:`committed` gave, and set the part to it."""
        self.set_value(committed)


class _StateDictHandler(StateHandler):
    """Keeps a part that has a ``state_dict``."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    @property
    def is_sharded(self) -> bool:  # type: ignore[override]  # of a part that may be sharded later
        """See :class:`StateHandler`."""
        return holds_shards(self.value)

    def save(self) -> None:
        """See :class:`StateHandler`."""
        refuse_other_shards(self.value)
        self._saved = copy_state(self.value)

    def restore(self) -> None:
        """See :class:`StateHandler`."""
        load_state(self.value, self._saved)

    def committed(self) -> Any:
        """See :class:`StateHandler`."""
        return self._saved

    def set_committed(self, committed: Any) -> None:
        """See :class:`StateHandler`."""
        self._saved = committed
        self.restore()


class ModelStateHandler(_StateDictHandler):
    """Keeps a ``torch.nn.Module``."""

    def sync(self) -> None:
        """See :class:`StateHandler`."""
        if not self.is_sharded:
            broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(_StateDictHandler):
    """Keeps a ``torch.optim.Optimizer``."""

    def sync(self) -> None:
        """See :class:`StateHandler`."""
        if not self.is_sharded:
            broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(_StateDictHandler):
    """Keeps an :class:`ElasticSampler`."""

    def sync(self) -> None:
        """See :class:`StateHandler`."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


_handlers: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Which handler keeps which kind of part; the first that fits."""
    return _handlers


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace what :func:`get_handler_registry` gives."""
    global _handlers  # noqa: PLW0603  # what get_handler_registry gave must stay, for whoever sets it again
    _handlers = registry


def make_handler(value: Any) -> StateHandler | None:
    """The handler for a part; None if it is kept as a Python object."""
    return next((handler(value) for kind, handler in _handlers if isinstance(value, kind)), None)
