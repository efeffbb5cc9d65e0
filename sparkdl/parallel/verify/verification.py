"""When the checks of a model run, and the checks that sharded models need."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparkdl.errors import ParamError
from sparkdl.parallel.verify.sketches import check_rows
from sparkdl.patches.compiler import not_compiled
from sparkdl.torch.averaging import device_of_counts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Verification:
    """The hooks that check a model, in its first step, in every step, or never.

    A step ends with the backward pass of the model's outputs, or, for stages, with the step of their pipeline. The
    first step ends with the first one that leaves gradients: FSDP2 leaves none while it accumulates them. Calls without
    gradients are verified likewise: each is a step, and there is a first one.

    Args:
        module: the model, or a stage of a pipeline; None for a pipeline itself.
        group: process group of the ranks that are compared.
        verify: whether the checks run in every step (True), never (False), or in the first step (None).
        dimension: kind of parallelism of the group if its ranks need the same rows.

    Attributes:
        is_paused: whether nothing is checked at the moment, as in a trial with uninitialized memory.
    """

    def __init__(
        self,
        module: nn.Module | None,
        group: dist.ProcessGroup,
        verify: bool | None,
        *,
        dimension: str = "",
    ) -> None:
        self._module, self._group, self._dimension = module, group, dimension
        self._is_always = verify is True
        self._is_over = {True: verify is False, False: verify is False}  # with and without gradients
        self.is_paused = False
        self._seen: set[str] = set()
        self._is_queued = False
        self._is_stage = getattr(module, "is_pipeline_stage", False)
        if module is not None:
            module.__dict__.setdefault(_ATTRIBUTE, []).append(self)
        if module is not None and verify is not False:
            module.register_forward_pre_hook(self._before_call, with_kwargs=True)
            module.register_forward_hook(self._after_call)

    def __reduce__(self) -> Any:  # a process group is not copied
        return _without_checks, (type(self),)

    @property
    def is_due(self) -> bool:
        """Whether the checks run in this step."""
        return not self.is_paused and (self._is_always or not self._is_over[torch.is_grad_enabled()])

    def begins(self, check: str) -> bool:
        """Whether a check is due that has not run in this step."""
        if not self.is_due or check in self._seen:
            return False
        self._seen.add(check)
        return True

    def check_rows(self, *lists: Sequence[Any]) -> None:
        """Check that the ranks are given the same rows, if they need them; see :func:`check_rows`. Collective."""
        if self._dimension and self.is_due:
            check_rows(self._dimension, lists, self._group)

    def end_step(self, *, with_gradients: bool = True) -> None:
        """Run the checks of a whole step, if they are due. Collective."""
        self._is_queued = False
        if self.is_paused or (self._is_over[with_gradients] and not self._is_always):
            return
        try:
            self._compare_step(with_gradients)
        finally:
            self._is_over[with_gradients] = (
                not with_gradients
                or self._module is None
                or any(parameter.grad is not None for parameter in self._module.parameters())
            )
            self._seen.clear()

    # torch.compile inlines the hooks, so that a check that is over costs compiled code nothing.
    def _before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.is_due:
            self._begin_call(module, args, kwargs)

    def _after_call(self, module: nn.Module, _: Any, output: Any) -> None:
        if self.is_due:
            self._end_call(module, output)

    @not_compiled
    def _begin_call(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check what the module is given; a stage of a pipeline gets its rows from another one."""
        if torch.is_grad_enabled() and not self._is_stage:
            self.check_rows([*args, *(kwargs[name] for name in sorted(kwargs))])

    @not_compiled
    def _end_call(self, _: nn.Module, output: Any) -> None:
        """Check what the module returns, and see to it that the step ends."""
        tensors = outputs_with_gradients(output)
        if not tensors:
            self.end_step(with_gradients=torch.is_grad_enabled())
        elif not self._is_stage:
            self._is_queued = False  # also if an error has ended the last backward pass
            for tensor in tensors:
                tensor.register_hook(self._queue)  # type: ignore[no-untyped-call]  # of torch

    def _queue(self, _: Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            engine: Any = torch.autograd.Variable._execution_engine
            # Twice, so that it runs after FSDP's own callback, which may be queued later than this one.
            engine.queue_callback(lambda: engine.queue_callback(self.end_step))

    def _compare_step(self, with_gradients: bool) -> None:
        """Compare what the ranks did in a step."""


_ATTRIBUTE = "_sparkdl_verifications"


def verifications_of(module: nn.Module) -> list[Verification]:
    """The verifications of a module and of the modules inside of it."""
    return [verification for inner in module.modules() for verification in inner.__dict__.get(_ATTRIBUTE, ())]


@contextmanager
def paused(verifications: Iterable[Verification]) -> Iterator[None]:
    """Context in which nothing is checked."""
    waiting = [verification for verification in verifications if not verification.is_paused]
    for verification in waiting:
        verification.is_paused = True
    try:
        yield
    finally:
        for verification in waiting:
            verification.is_paused = False


def _without_checks(kind: type[Verification]) -> Verification:
    made = kind.__new__(kind)
    Verification.__init__(made, None, cast("Any", None), False)
    return made


def outputs_with_gradients(output: Any) -> list[Tensor]:
    """The tensors of an output for which a backward pass computes gradients."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]


class ShardedVerification(Verification):
    """Checks that ranks which share the weights of blocks call the same blocks and get the same gradients.

    FSDP2 gathers a block when a rank calls it, and reduces the gradients that a rank has. If ranks called different
    blocks, or a parameter had a gradient on some of them only, weights and gradients of different parameters would be
    mixed wherever their sizes agree.

    Args:
        module: the sharded module.
        blocks: its sharded blocks.
        group: process group of ranks that share weights or replicate them.
        verify: see :class:`Verification`.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        group: dist.ProcessGroup,
        verify: bool | None,
    ) -> None:
        super().__init__(module, group, verify)
        self._sharded = module
        names = {layer: name for name, layer in module.named_modules()}
        self._num_calls = {names[block]: 0 for block in blocks}
        for block in blocks if verify is not False else ():
            block.register_forward_pre_hook(functools.partial(self._count, names[block]))

    @not_compiled
    def _count(self, name: str, *_: object) -> None:
        if self.is_due:
            self._num_calls[name] += 1

    def _compare_step(self, with_gradients: bool) -> None:
        names, counts = list(self._num_calls), list(self._num_calls.values())
        self._num_calls = dict.fromkeys(names, 0)
        did = "called different blocks"
        if with_gradients:
            did = "used different blocks or parameters"
            # Not kept: weights that are drawn or loaded later are other parameters.
            for name, parameter in self._sharded.named_parameters():
                if parameter._backward_hooks:
                    raise ParamError(
                        f"register_hook() was called for {name!r} of a sharded model, which never calls such hooks. "
                        "Use register_post_accumulate_grad_hook(), which gets the parameter with this rank's part of "
                        "its gradient."
                    )
                names.append(name)
                counts.append(int(parameter.grad is not None))
        device = device_of_counts(next(self._sharded.parameters()).device, self._group)
        numbers = torch.tensor(counts, dtype=torch.int32, device=device)
        extremes = torch.stack([numbers, -numbers])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group)
        differs = (extremes[0] != -extremes[1]).nonzero().flatten().tolist()
        if differs:
            raise ParamError(
                f"The ranks of a sharded model {did} in one step, the first of them {names[differs[0]]!r}: their "
                "weights would be mixed. Have forward use the same layers for all rows, or train replicas (data in "
                "place of shard)."
            )
