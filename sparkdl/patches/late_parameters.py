"""DistributedDataParallel averages the gradients of parameters that were unfrozen or added after it was made.

On its own it averages those that were trained when it was made, and each rank would train later ones on its own rows.
Here, the forward pass looks for later ones. All that were added, also frozen ones, begin with the values of the first
rank, and at the end of a backward pass that averages, the gradients of those that are trained are averaged together.

Not for models whose other dimension is tensor parallelism, and not for the compiled reducer
(``optimize_ddp="python_reducer"``). Under ``join``, later parameters are an error: ranks without rows take no part.

Upstream: https://github.com/pytorch/pytorch/issues/12603 left it so. Versions: all up to torch 2.13. It can go when
torch's reducer takes up such parameters.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world
from torch.distributed.utils import _sync_params_and_buffers
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from sparkdl.errors import ParamError
from sparkdl.patches.compiler import not_compiled

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist


_STATE = "_sparkdl_late_parameters"


def average_late_parameters(
    backend: str,
    layers_of: Callable[[nn.Module], Any],
    average: Callable[[list[nn.Parameter], dist.ProcessGroup], None],
) -> None:
    """Let DistributedDataParallel average later parameters in groups of a backend; once.

    Args:
        backend: name of the backend.
        layers_of: function that returns the layers of a module, with their ``parameters``, and ``look()``, which each
            forward pass calls: whether layers, parameters, or their ``requires_grad`` have changed since the last look.
        average: function that averages the gradients of parameters over the ranks of a group.
    """
    kind: Any = DistributedDataParallel
    build, before, after = kind._build_params_for_reducer, kind._pre_forward, kind._post_forward
    if hasattr(build, "__wrapped__"):
        return

    @wraps(build)
    def build_params_for_reducer(self: Any) -> Any:
        averaged, expects_sparse = build(self)
        has_tensor_parallelism = any(hasattr(parameter, "_st_info") for parameter in self.module.parameters())
        if backend in str(_world.pg_backend_config.get(self.process_group)) and not has_tensor_parallelism:
            self.__dict__[_STATE] = _LateParameters(self, layers_of(self.module), set(averaged), average)
        return averaged, expects_sparse

    # Before the pass, so that it computes with the first rank's values, and afterwards, as it may unfreeze parameters.
    @wraps(before)
    def pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if not self._use_python_reducer:
            _look(self)
        return before(self, *inputs, **kwargs)

    @wraps(after)
    def post_forward(self: Any, output: Any) -> Any:
        output = after(self, output)
        if not self._use_python_reducer:
            _look(self, output)
        return output

    kind._build_params_for_reducer, kind._pre_forward, kind._post_forward = (
        build_params_for_reducer,
        pre_forward,
        post_forward,
    )


@not_compiled
def _look(wrapper: Any, output: Any = None) -> None:
    late = wrapper.__dict__.get(_STATE)
    if isinstance(late, _LateParameters) and torch.is_grad_enabled():
        late.look(wrapper)
        late.average_after(wrapper, output)


class _LateParameters:
    """The later parameters of a DistributedDataParallel.

    Args:
        wrapper: the DistributedDataParallel.
        layers: its layers.
        averaged: the parameters that it averages itself.
        average: see :func:`average_late_parameters`.
    """

    def __init__(
        self, wrapper: Any, layers: Any, averaged: set[nn.Parameter], average: Callable[..., None]
    ) -> None:
        self._layers, self._averaged, self._average = layers, averaged, average
        self._equal = set(layers.parameters)
        self._ignored = {
            parameter
            for name, parameter in wrapper.module.named_parameters()
            if name in wrapper.parameters_to_ignore
        }
        self._late: list[nn.Parameter] = []
        self._is_queued = False

    def __reduce__(self) -> Any:  # a copy or a loaded wrapper makes its own
        return dict, ()

    def look(self, wrapper: Any) -> None:
        """Find later parameters; give all that were added the first rank's values. Collective if there are any."""
        if not self._layers.look():
            return
        parameters = [parameter for parameter in self._layers.parameters if parameter not in self._ignored]
        late = [
            parameter
            for parameter in parameters
            if parameter.requires_grad and parameter not in self._averaged
        ]
        added = [parameter for parameter in parameters if parameter not in self._equal]
        if (late or added) and wrapper._join_config.enable:
            raise ParamError(
                "Parameters were unfrozen or added under join(), where ranks without rows take no part in averaging "
                "them. Do so outside of join(), or create DistributedDataParallel again."
            )
        if added:
            values = [parameter.detach() for parameter in added]
            _sync_params_and_buffers(wrapper.process_group, values, wrapper.broadcast_bucket_size, 0)
        self._equal = set(parameters)
        self._late = late

    def average_after(self, wrapper: Any, output: Any) -> None:
        """Average the gradients of later parameters at the end of the backward pass of an output."""
        if not self._late or not wrapper.require_backward_grad_sync:
            return
        self._is_queued = False  # also if an error has ended the last backward pass
        group, engine = wrapper.process_group, torch.autograd.Variable._execution_engine

        def average() -> None:
            self._is_queued = False
            self._average(self._late, group)

        def queue(_: Tensor) -> None:
            if not self._is_queued:
                self._is_queued = True
                # Twice, so that it runs after the callback of the reducer, which may be queued later than this one.
                engine.queue_callback(lambda: engine.queue_callback(average))

        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(queue)
