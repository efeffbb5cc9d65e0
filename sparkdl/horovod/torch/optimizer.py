"""``hvd.DistributedOptimizer``: an optimizer that steps with gradients reduced over the ranks.

:class:`HookedStep` is the base class of all these optimizers: it counts backward passes, and its hooks are called with
each gradient. Its subclasses define how gradients are reduced. Functions of this module choose which gradients are
reduced as one operation, check ``named_parameters`` as Horovod does, and give unnamed parameters Horovod's names.

With ``op=Adasum`` each rank steps by itself, and the changes are combined. As soon as a gradient is complete, the
wrapped optimizer steps with this one parameter, and the Adasum of the change is started while the backward pass
continues. With any other ``op`` the hooks start the allreduce of a gradient while the backward pass still runs.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from sparkdl.horovod.torch.basics import size
from sparkdl.horovod.torch.compression import Compression, Compressor
from sparkdl.horovod.torch.functions import broadcast_object, kept_containers
from sparkdl.horovod.torch.gradient_reduction import GradientReduction, is_idle
from sparkdl.horovod.torch.handles import synchronize
from sparkdl.horovod.torch.names import Adasum, Average, choose
from sparkdl.horovod.torch.operations.allreduce import allreduce_async_
from sparkdl.horovod.torch.operations.preparation import refuse_subclasses
from sparkdl.horovod.torch.process_sets import ProcessSet, global_process_set


class HookedStep(torch.optim.Optimizer):
    """Base class of distributed optimizers, which precedes the wrapped optimizer's class among their bases.

    Attributes:
        backward_passes_per_step: number of backward passes whose gradients add up to one step.
        op: number of the reduction.
        gradient_predivide_factor: divisor of gradients before the sum, if ``op`` is ``Average``.
        sparse_as_dense: whether sparse gradients are reduced as dense ones.
        process_set: ranks that take part.
    """

    backward_passes_per_step: int
    op: int
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet
    _parameter_names: dict[torch.nn.Parameter, str]
    _passes_left: dict[torch.nn.Parameter, int]

    def _count_passes(
        self, parameters: Iterable[torch.nn.Parameter], backward_passes_per_step: int, *, hooks: bool = True
    ) -> None:
        """Begin to count backward passes, by a hook for every gradient, for as long as this optimizer exists.

        Args:
            parameters: parameters whose gradients count.
            backward_passes_per_step: number of passes of a step.
            hooks: whether to register the hooks; False on ranks that reduce nothing.
        """
        self._passes_left = {parameter: 0 for parameter in parameters if parameter.requires_grad}
        self.set_backward_passes_per_step(backward_passes_per_step)
        if hooks:
            self._hooks: list[torch.utils.hooks.RemovableHandle] = []
            weakref.finalize(self, _remove, self._hooks).atexit = False
            for parameter in self._passes_left:
                self._hook(parameter)

    def _hook(self, parameter: torch.nn.Parameter) -> None:
        # The garbage collector does not see the hooks that autograd holds: a hook with a reference to this object would
        # keep it and the parameters alive for ever.
        on_gradient = partial(_call, weakref.WeakMethod(self._on_gradient))
        self._hooks.append(parameter.register_post_accumulate_grad_hook(on_gradient))

    def _take_up_new(self) -> None:
        """Reduce from now on also the gradients of parameters that were added or unfrozen since the last step."""
        for group_number, group in enumerate(self.param_groups):
            for number, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter not in self._passes_left:
                    name = self._parameter_names.setdefault(parameter, _default_name(group_number, number))
                    refuse_subclasses({parameter: name})
                    self._passes_left[parameter] = self.backward_passes_per_step
                    self._add(parameter)
                    self._hook(parameter)

    def _add(self, parameter: torch.nn.Parameter) -> None:
        """Prepare the reduction of a parameter that was not reduced before."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, whose gradients are reduced as well; they need the same values on all ranks."""
        super().add_param_group(param_group)
        self._take_up_new()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes that add up to one step; call it between steps."""
        self.backward_passes_per_step = passes
        self._passes_left = dict.fromkeys(self._passes_left, passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises:
            AssertionError: if a backward pass has begun a step that has not ended.
        """
        if any(left < self.backward_passes_per_step for left in self._passes_left.values()):
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state as the wrapped optimizer does, and begin a new step."""
        self._forget()
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        with kept_containers(self):
            super().load_state_dict(state_dict)

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        if self._passes_left[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] == 0:
            self._take(parameter)

    def _take(self, parameter: torch.nn.Parameter) -> None:
        """Handle a parameter whose gradient is complete: all backward passes of the step have added to it."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Drop the reductions that the current step has started."""
        raise NotImplementedError


def _call(method: weakref.WeakMethod[Any], parameter: torch.nn.Parameter) -> None:
    on_gradient = method()
    if on_gradient is not None:
        on_gradient(parameter)


def _remove(hooks: list[torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


Groups = int | Sequence[Sequence[torch.Tensor]] | None


def check_groups(groups: Groups) -> None:
    """Check the argument ``groups``.

    Raises:
        ValueError: if it is neither a positive number nor lists of distinct tensors; with Horovod's message.
    """
    if groups is None or (isinstance(groups, int) and groups > 0):
        return
    if not isinstance(groups, (list, tuple)):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    entries = [entry for group in groups for entry in group]
    if any(not isinstance(entry, torch.Tensor) for entry in entries):
        raise ValueError("groups must consist of torch.Tensor.")
    if len({id(entry) for entry in entries}) < len(entries):
        raise ValueError("A parameter can only appear once in groups.")


def form_groups(
    parameters: Sequence[torch.nn.Parameter], groups: Groups
) -> list[tuple[torch.nn.Parameter, ...]]:
    """Divide parameters into groups.

    Args:
        parameters: parameters, in the same order on all ranks.
        groups: number of groups, which get about equally many parameters; or lists of parameters, where each parameter
            in no list forms a group of its own; or None for one group per parameter.
    """
    if groups is None:
        return [(parameter,) for parameter in parameters]
    if isinstance(groups, int):
        least, remaining = divmod(len(parameters), groups)
        starts = [number * least + min(number, remaining) for number in range(groups + 1)]
        parts = [tuple(parameters[start:end]) for start, end in itertools.pairwise(starts)]
        return [part for part in parts if part]
    by_id = {id(parameter): parameter for parameter in parameters}
    listed = [tuple(by_id.pop(id(entry)) for entry in group if id(entry) in by_id) for group in groups]
    return [group for group in listed if group] + [(parameter,) for parameter in by_id.values()]


def name_parameters(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> dict[torch.nn.Parameter, str]:
    """Give every parameter of an optimizer a name, the same on all ranks.

    Args:
        optimizer: optimizer whose parameters get names.
        named_parameters: names and parameters, as from ``model.named_parameters()``; those of parameters that the
            optimizer does not have are ignored. None to name parameters by their position.

    Raises:
        ValueError: if a name occurs twice, or a parameter has no name; with Horovod's message.
    """
    if named_parameters is None:
        return {
            parameter: _default_name(group_number, number)
            for group_number, group in enumerate(optimizer.param_groups)
            for number, parameter in enumerate(group["params"])
        }
    named = list(named_parameters)
    if any(not isinstance(entry, tuple) for entry in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    duplicates = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if duplicates:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: " + ", ".join(duplicates)
        )
    parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    names = {parameter: name for name, parameter in named if parameter in parameters}
    unnamed = [str(id(parameter)) for parameter in parameters if parameter not in names]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            "Python object ids: " + ", ".join(unnamed)
        )
    return names


def _default_name(group_number: int, number: int) -> str:
    return f"allreduce.noname.{group_number}.{number}"


class AdasumStep(HookedStep):
    """Steps with each parameter as soon as its gradient is complete, and combines the ranks' changes by Adasum."""

    _compression: type[Compressor]

    def _begin(
        self,
        names: Mapping[torch.nn.Parameter, str],
        compression: type[Compressor],
        backward_passes_per_step: int,
    ) -> None:
        self._compression = compression
        self._under_way: dict[torch.nn.Parameter, tuple[int, torch.Tensor, Any]] = {}
        """Handle, value before the step, and the compressor's context, by parameter."""
        self._count_passes(names, backward_passes_per_step)

    def _forget(self) -> None:
        self._under_way.clear()

    @torch.no_grad()
    def _take(self, parameter: torch.nn.Parameter) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        before = parameter.detach().clone()
        with self._only(parameter):
            super().step()
        change, context = self._compression.compress(parameter.detach() - before)
        parameter.copy_(before)
        handle = allreduce_async_(change, name=self._parameter_names[parameter], op=Adasum)
        self._under_way[parameter] = (handle, before, context)

    @contextmanager
    def _only(self, parameter: torch.nn.Parameter) -> Iterator[None]:
        """Within this context, the wrapped optimizer has only this parameter."""
        stashed = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [entry for entry in group["params"] if entry is parameter]
        try:
            yield
        finally:
            for group, parameters in zip(self.param_groups, stashed, strict=True):
                group["params"] = parameters

    def synchronize(self) -> None:
        """Do nothing: ``step`` waits for the reductions."""

    def skip_synchronize(self) -> None:
        """Not supported: Adasum combines the changes, not the gradients.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Combine the changes of all parameters and apply them, after calling ``closure`` if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_up_new()
        for parameter in self._passes_left:
            if parameter not in self._under_way and not is_idle(parameter):
                self._take(parameter)
        for parameter, (handle, before, context) in self._under_way.items():
            change = self._compression.decompress(synchronize(handle), context)
            parameter.copy_(before + change)
        self._under_way.clear()
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        return loss


def DistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> torch.optim.Optimizer:
    """Wrap an optimizer so that ``step`` uses gradients reduced over the ranks.

    Args:
        optimizer: optimizer to wrap; the result shares its parameter groups and state, and is an instance of a subclass
            of its class.
        named_parameters: ``model.named_parameters()``; the ranks match gradients by these names.
        compression: compressor for the gradients that are sent.
        backward_passes_per_step: number of backward passes whose gradients add up to one step.
        op: ``Average`` or ``Sum``, or another operation of :func:`sparkdl.horovod.torch.allreduce`. With
            ``Adasum`` each rank steps by itself and the changes are combined.
        gradient_predivide_factor: divisor of gradients before the sum, if ``op`` is ``Average``; after
            it they are divided by the number of ranks over this factor.
        num_groups: deprecated by Horovod; use ``groups``.
        groups: gradients that are reduced as one operation: a number of groups, or lists of parameters.
        sparse_as_dense: whether to convert sparse gradients to dense ones before they are reduced.
        process_set: ranks that take part; on the other ranks the optimizer steps with its own gradients.

    Raises:
        ValueError: if names are not unique, a parameter has no name or is a DTensor, or options cannot be combined.
        NotImplementedError: if ``op`` is ``Adasum`` and not all ranks take part.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    check_groups(groups)
    op = choose(op, None)
    names = name_parameters(optimizer, named_parameters)
    refuse_subclasses(names)
    is_adasum = op == Adasum and size() > 1
    if is_adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    step: type = AdasumStep if is_adasum else _ReducedStep
    wrapped: Any = _wrap(optimizer, step)
    wrapped.op, wrapped.process_set = op, process_set
    wrapped.gradient_predivide_factor, wrapped.sparse_as_dense = gradient_predivide_factor, sparse_as_dense
    wrapped._parameter_names = names
    if is_adasum:
        wrapped._begin(names, compression, backward_passes_per_step)
    else:
        reduction = None
        if process_set.included() and size() > 1:
            reduction = GradientReduction(
                names,
                form_groups(_ordered_parameters(names, groups, process_set), groups),
                compression=compression,
                op=op,
                predivide_factor=gradient_predivide_factor,
                sparse_as_dense=sparse_as_dense,
                process_set=process_set,
            )
        wrapped._begin(reduction, [*names], backward_passes_per_step)
    return wrapped  # type: ignore[no-any-return]  # of a class made at run time


def _wrap(optimizer: torch.optim.Optimizer, step: type) -> Any:
    kind: Any = type(type(optimizer).__name__, (step, type(optimizer)), {})
    wrapped: Any = kind.__new__(kind)
    # Not `step`: a learning rate scheduler that was made first has stored one that is bound to the unwrapped optimizer.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    return wrapped


def _ordered_parameters(
    names: dict[torch.nn.Parameter, str], groups: Groups, process_set: ProcessSet
) -> list[torch.nn.Parameter]:
    """The parameters that require gradients; in the first rank's order if ``groups`` is a number."""
    parameters = [parameter for parameter in names if parameter.requires_grad]
    if not isinstance(groups, int):
        return parameters
    assert process_set.ranks is not None
    first = process_set.ranks[0]
    order = broadcast_object([names[parameter] for parameter in parameters], first, None, process_set)
    return sorted(parameters, key=lambda parameter: order.index(names[parameter]))


class _ReducedStep(HookedStep):
    """Steps with reduced gradients."""

    _reduction: GradientReduction | None

    def _begin(
        self,
        reduction: GradientReduction | None,
        parameters: Iterable[torch.nn.Parameter],
        backward_passes_per_step: int,
    ) -> None:
        self._reduction = reduction
        self._synchronized = False
        self._should_synchronize = True
        self._count_passes(parameters, backward_passes_per_step, hooks=reduction is not None)

    def _take_up_new(self) -> None:
        if self._reduction is not None:
            super()._take_up_new()

    def _add(self, parameter: torch.nn.Parameter) -> None:
        assert self._reduction is not None
        self._reduction.add(parameter)

    def _take(self, parameter: torch.nn.Parameter) -> None:
        assert self._reduction is not None
        self._reduction.mark_ready(parameter)

    def _forget(self) -> None:
        if self._reduction is not None:
            self._reduction.forget()
        self._synchronized = False

    def synchronize(self) -> None:
        """Start the reductions that no backward pass has started, and wait for all of them.

        Raises:
            ValueError: if the process set belongs to an earlier world, even on ranks that reduce nothing.
        """
        self.process_set._check_world("DistributedOptimizer")
        if self._reduction is not None:
            self._take_up_new()
            self._reduction.finish()
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step`` use the gradients as they are, after a call to ``synchronize``."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Reduce the gradients, unless within ``skip_synchronize``, and step.

        With a closure, the gradients and the loss of each of its calls are reduced. Optimizers such as
        ``torch.optim.LBFGS`` use the loss to choose their steps.
        """
        if closure is not None:
            loss = super().step(self._reducing(closure) if self._should_synchronize else closure)
            self._synchronized = False
            return loss
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step()

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduce() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            if self._reduction is None or loss is None:
                return loss
            value = (
                torch.as_tensor(loss, dtype=None if torch.is_tensor(loss) else torch.float64).detach().clone()
            )
            reduced = self._reduction.reduce_loss(value)
            return reduced if torch.is_tensor(loss) else reduced.item()

        return reduce
