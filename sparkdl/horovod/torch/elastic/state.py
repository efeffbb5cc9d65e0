"""``hvd.elastic.TorchState``: models, optimizers, samplers and Python objects that are committed together.

If a state has DTensors, as with FSDP2 and tensor parallelism, each rank keeps its own part of it. A copy of such a
state holds the local tensors of this rank and their layout. Only the same rank of a world with the same layout can load
it: nothing is exchanged and nothing is resharded.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sparkdl.errors import CheckpointError, ParamError
from sparkdl.horovod.torch.basics import rank
from sparkdl.horovod.torch.elastic.commits import ObjectState
from sparkdl.horovod.torch.elastic.sampler import ElasticSampler
from sparkdl.horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters

_LAYOUT = "sparkdl.layout"
"""The key that marks a dict as the copy of a DTensor."""


def holds_shards(value: Any) -> bool:
    """Whether a module or an optimizer has DTensors among its parameters and buffers."""
    return any(True for _ in _dtensors_of(value))


def is_pipeline_stage(value: Any) -> bool:
    """Whether a module is or contains a pipeline stage of :func:`sparkdl.parallel.cut`."""
    return isinstance(value, torch.nn.Module) and any(
        getattr(module, "is_pipeline_stage", False) for module in value.modules()
    )


def refuse_other_shards(value: Any) -> None:
    """Refuse modules and optimizers sharded without DTensors: rank 0's state is not that of the other ranks.

    Raises:
        ParamError: if it is a module sharded by FSDP1, or an optimizer of its parameters.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    is_fsdp1 = isinstance(value, torch.nn.Module) and any(
        isinstance(module, fsdp.FullyShardedDataParallel) for module in value.modules()
    )
    if is_fsdp1 or any(isinstance(tensor, fsdp.FlatParameter) for _, tensor in _tensors_of(value)):
        raise ParamError(
            f"A {type(value).__name__} sharded by FullyShardedDataParallel (FSDP1) cannot be kept in a state: no rank "
            "has all of it, and its parts do not say what they are. Shard it by torch.distributed.fsdp.fully_shard."
        )


def copy_state(value: Any) -> Any:
    """Copy the ``state_dict`` of a module or an optimizer; DTensors become plain dicts, which a file can hold.

    Raises:
        ParamError: if a DTensor of the state has a layout that no parameter has.
    """
    state = value.state_dict()
    if not holds_shards(value):
        return copy.deepcopy(state)
    layouts = _layouts_of(value)

    def copied(tensor: torch.Tensor, name: str) -> Any:
        if not _is_dtensor(tensor):
            return tensor.detach().clone()
        layout = _layout_of(tensor)
        if layout not in layouts:
            raise ParamError(
                f"The {type(value).__name__}'s {name} is a DTensor of {layout}, and no parameter is; such a state "
                "cannot be committed. Use an optimizer whose state is sharded like the parameters, as Adam's is."
            )
        dtensor: Any = tensor
        return {
            _LAYOUT: layout,
            "local": dtensor.to_local().detach().clone(),
            "shape": list(dtensor.shape),
            "stride": list(dtensor.stride()),
        }

    return _map_tensors(state, copied)


def load_state(value: Any, saved: Any) -> None:
    """Load a copy made by :func:`copy_state` without changing the copy.

    Raises:
        CheckpointError: if the layout of the copy over the ranks differs from that of ``value``.
    """
    if not holds_shards(value):
        if _find_layout(saved) is not None:
            raise CheckpointError(
                f"The commit of the {type(value).__name__} is of DTensors of {_find_layout(saved)}, and it has none "
                "now. Shard it as before, or begin anew with another checkpoint_dir."
            )
        # A copy, as what is loaded may become part of the value, which changes later.
        value.load_state_dict(copy.deepcopy(saved))
        return
    layouts = _layouts_of(value)
    loaded: Any = _map_tensors(
        saved, lambda tensor, _: tensor.detach().clone(), _make_dtensors(value, layouts)
    )
    if isinstance(value, torch.nn.Module):
        loaded = OrderedDict(loaded)
        loaded._metadata = getattr(value.state_dict(), "_metadata", None)
    value.load_state_dict(loaded)


def _make_dtensors(value: Any, layouts: dict[str, tuple[Any, Any]]) -> Callable[[dict[str, Any], str], Any]:
    from torch.distributed.tensor import DTensor

    def make(entry: dict[str, Any], name: str) -> Any:
        if entry[_LAYOUT] not in layouts:
            raise CheckpointError(
                f"The {type(value).__name__}'s {name} was committed as a DTensor of {entry[_LAYOUT]}, and now there "
                f"are DTensors of {'; '.join(layouts)}. Lay it out over as many ranks in the same way as before, or "
                "begin anew with another checkpoint_dir."
            )
        mesh, placements = layouts[entry[_LAYOUT]]
        return DTensor.from_local(
            entry["local"].detach().clone().to(mesh.device_type),
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(entry["shape"]),
            stride=tuple(entry["stride"]),
        )

    return make


def _map_tensors(
    value: Any,
    of_tensor: Callable[[torch.Tensor, str], Any],
    of_entry: Callable[[dict[str, Any], str], Any] | None = None,
    name: str = "",
) -> Any:
    """Copy nested dicts, lists and tuples; replace tensors by ``of_tensor`` and dicts of DTensors by ``of_entry``."""
    if isinstance(value, torch.Tensor):
        return of_tensor(value, name)
    if isinstance(value, dict):
        if of_entry is not None and _LAYOUT in value:
            return of_entry(value, name)
        return {
            key: _map_tensors(each, of_tensor, of_entry, f"{name}.{key}".strip("."))
            for key, each in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(each, of_tensor, of_entry, name) for each in value)
    return copy.deepcopy(value)


def _find_layout(saved: Any) -> str | None:
    if isinstance(saved, dict):
        if _LAYOUT in saved:
            return str(saved[_LAYOUT])
        saved = tuple(saved.values())
    if type(saved) in (list, tuple):
        return next(filter(None, map(_find_layout, saved)), None)
    return None


def _tensors_of(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.nn.Module):
        yield from value.named_parameters()
        yield from value.named_buffers()
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            for number, parameter in enumerate(group["params"]):
                yield str(number), parameter


def _dtensors_of(value: Any) -> Iterator[Any]:
    if "torch.distributed.tensor" in sys.modules:
        yield from (tensor for _, tensor in _tensors_of(value) if _is_dtensor(tensor))


def _is_dtensor(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _layouts_of(value: Any) -> dict[str, tuple[Any, Any]]:
    """The meshes and placements of a value's DTensors, by the text of :func:`_layout_of`."""
    return {_layout_of(tensor): (tensor.device_mesh, tensor.placements) for tensor in _dtensors_of(value)}


def _layout_of(dtensor: Any) -> str:
    mesh = dtensor.device_mesh
    names = f" {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
    position = None if mesh.get_coordinate() is None else tuple(mesh.get_coordinate())
    return f"{tuple(dtensor.placements)} over ranks {mesh.mesh.tolist()}{names} at {position}"


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
        parts = {"model": model, "optimizer": optimizer, **kwargs}
        found = {name: make_handler(value) for name, value in parts.items()}
        self._handlers = {name: handler for name, handler in found.items() if handler is not None}
        if any(is_pipeline_stage(handler.value) for handler in self._handlers.values()):
            for handler in self._handlers.values():
                if isinstance(handler, ModelStateHandler | OptimizerStateHandler):
                    handler.is_of_stage = True
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
        """Set all parts to their remembered state."""
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
    """Keeps one part of a state; subclass it for further types of parts, see :func:`set_handler_registry`.

    Attributes:
        value: part of the state.
        is_sharded: whether each rank keeps its own piece of the part, which differs from rank 0's.
    """

    is_sharded: bool = False

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Remember the part as it is now."""
        raise NotImplementedError

    def restore(self) -> None:
        """Set the part to its remembered state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Set the part of all ranks to rank 0's, and remember it."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Keep ``value`` as the part from now on."""
        self.value = value
        self.save()

    def committed(self) -> Any:
        """The remembered state, to store in a file; the part itself unless a subclass overrides this."""
        return self.value

    def set_committed(self, committed: Any) -> None:
        """Remember a state that :meth:`committed` returned, and set the part to it."""
        self.set_value(committed)


class _StateDictHandler(StateHandler):
    """Keeps a part that has a ``state_dict``.

    Attributes:
        is_of_stage: whether the part belongs to a pipeline stage, so that it differs between ranks.
    """

    is_of_stage = False

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    @property
    def is_sharded(self) -> bool:  # type: ignore[override]  # a property, as the part may be sharded later
        """See :class:`StateHandler`."""
        return self.is_of_stage or holds_shards(self.value)

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
    """The types of parts and their handlers; the first type that matches a part is used."""
    return _handlers


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the registry that :func:`get_handler_registry` returns."""
    global _handlers  # noqa: PLW0603  # what get_handler_registry gave must stay, as a program may set it again
    _handlers = registry


def make_handler(value: Any) -> StateHandler | None:
    """The handler for a part; None if it is kept as a Python object."""
    return next((handler(value) for kind, handler in _handlers if isinstance(value, kind)), None)
