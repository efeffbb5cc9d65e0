"""DistributedDataParallel averages the gradients of parameters that were unfrozen or added after it was made.

On its own it knows only the parameters that were trained when it was made, and each rank would train later ones on its
own rows. Here, if a forward pass finds later ones, it gives those that were added the values of the first rank, and
makes the reducer anew, with all of them.

Upstream: https://github.com/pytorch/pytorch/issues/12603 left it so. Versions: all up to torch 2.13. It can go when
torch's reducer takes up such parameters.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._C._distributed_c10d import _register_comm_hook
from torch.distributed.distributed_c10d import _world
from torch.distributed.utils import _sync_params_and_buffers, _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel

from sparkdl.patches.compiler import not_compiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn


class Layers(Protocol):
    """The layers and parameters that a module has now.

    Attributes:
        parameters: the parameters.
    """

    parameters: list[nn.Parameter]

    def look(self) -> bool:
        """Whether layers, parameters, or their ``requires_grad`` have changed since the last look."""


_STATE = "_sparkdl_late_parameters"


def average_late_parameters(backend: str, layers_of: Callable[[nn.Module], Layers]) -> None:
    """Let DistributedDataParallel take up later parameters in groups of a backend; once.

    Args:
        backend: name of the backend.
        layers_of: function that returns the layers of a module, to be looked at in each forward pass.
    """
    kind: Any = DistributedDataParallel
    build, before, after = kind._build_params_for_reducer, kind._pre_forward, kind._post_forward
    if hasattr(build, "__wrapped__"):
        return

    @wraps(build)
    def build_params_for_reducer(self: Any) -> Any:
        parameters, expects_sparse = build(self)
        if backend in str(_world.pg_backend_config.get(self.process_group)):
            ignored = self.parameters_to_ignore
            tensors = {name: tensor for name, tensor in _tensors(self.module) if name not in ignored}
            self.__dict__[_STATE] = _Known(layers_of(self.module), set(parameters), set(tensors.values()))
        return parameters, expects_sparse

    # Before the pass, so that it computes with the first rank's values, and afterwards, as it may unfreeze parameters.
    @wraps(before)
    def pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        _take_up(self)
        return before(self, *inputs, **kwargs)

    @wraps(after)
    def post_forward(self: Any, output: Any) -> Any:
        _take_up(self)
        return after(self, output)

    kind._build_params_for_reducer, kind._pre_forward, kind._post_forward = (
        build_params_for_reducer,
        pre_forward,
        post_forward,
    )


class _Known:
    """What the reducer of a DistributedDataParallel has, and what all ranks have alike."""

    def __init__(self, layers: Layers, averaged: set[nn.Parameter], equal: set[Tensor]) -> None:
        self.layers, self.averaged, self.equal = layers, averaged, equal

    def __reduce__(self) -> Any:  # a copy or a loaded wrapper makes a reducer of its own
        return dict, ()


@not_compiled
def _take_up(wrapper: Any) -> None:
    known = wrapper.__dict__.get(_STATE)
    if not isinstance(known, _Known) or not torch.is_grad_enabled() or not known.layers.look():
        return
    ignored = wrapper.parameters_to_ignore
    tensors = {tensor for name, tensor in _tensors(wrapper.module) if name not in ignored}
    late = {tensor for tensor in tensors if tensor.requires_grad} - known.averaged
    if not late:
        return
    parameters, expects_sparse = wrapper._build_params_for_reducer()
    _verify_param_shape_across_processes(wrapper.process_group, parameters)
    added = [tensor.detach() for name, tensor in _tensors(wrapper.module) if tensor in tensors - known.equal]
    if added:
        _sync_params_and_buffers(wrapper.process_group, added, wrapper.broadcast_bucket_size, 0)
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, expects_sparse, names, wrapper.static_graph)
    for hook, state in wrapper._comm_hooks:
        _register_comm_hook(wrapper.reducer, state, hook)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
