"""Sharded data parallelism: weights, gradients and optimizer state divided among ranks that train on different rows.

Uses FSDP2 (``torch.distributed.fsdp.fully_shard``) on each block of the model: a block's weights are gathered when it
computes. Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).
"""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from sparkdl.errors import ParamError
from sparkdl.parallel.collectives import begin_equal
from sparkdl.parallel.parallelism import SHARDING_STAGES
from sparkdl.parallel.replaced_parameters import noting_replaced_parameters
from sparkdl.parallel.verify.copies import check_equal
from sparkdl.parallel.verify.verification import ShardedVerification
from sparkdl.torch.averaging import average_gradients_of
from sparkdl.torch.buffers import whole_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sparkdl.parallel.parallelism import RankLayout


def shard(
    module: nn.Module,
    layout: RankLayout,
    *,
    stage: int = 3,
    blocks: Sequence[nn.Module] | None = None,
    dtype: torch.dtype | None = None,
    offload: bool = False,
) -> nn.Module:
    """Shard a module over the ranks that train on different rows, in place.

    The shards lie along ``shard`` and ``context``; with ``data`` greater than one they are replicated along it (hybrid
    sharding). Gradients are averaged over all of these ranks. Layers that :func:`~sparkdl.parallel.divide` has
    divided stay divided, and each part is sharded.

    Args:
        module: the whole model, or a model on the meta device. All ranks begin with the weights and buffers of the
            first one, as replicas do in DDP.
        layout: layout of the ranks.
        stage: ZeRO stage: 3 shards weights, gradients and optimizer state; 2 keeps a block's weights from its forward
            to its backward pass; 1 also keeps whole gradients while they are accumulated over several batches.
        blocks: modules whose weights are gathered together when they are called; the members of the model's lists of
            layers if None, and without such a list the layers of a ``Sequential`` or the whole model.
        dtype: dtype in which blocks compute, where gradients are then summed in float32; weights and gradients keep
            their dtype. None for the dtype of the weights.
        offload: whether shards lie in host memory, and a block's weights on the GPU only while it computes.

    Returns:
        ``module``, now also an ``FSDPModule``. Its parameters are new ones: make the optimizer afterwards.

    Raises:
        ParamError: if there is no such stage, ``offload`` is set on CPUs, or the module is sharded already.
    """
    if isinstance(module, FSDPModule):
        raise ParamError(
            "The module is already sharded. Call shard() once, after divide() and share_sequences()."
        )
    if stage not in SHARDING_STAGES:
        raise ParamError(f"The stage of sharding must be 1, 2 or 3, got {stage!r}.")
    if offload and layout.mesh.device_type == "cpu":
        raise ParamError(
            "offload moves shards from a GPU to host memory; on CPUs they lie there already. Leave it out."
        )
    mesh = layout.sharding_mesh[("data", "shard") if layout.size("data") > 1 else "shard"]
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32 if dtype is not None else None
    )
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "reshard_after_forward": stage == 3,
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    check_shardable(module)
    for name in ("data", "shard", "context"):
        if layout.size(name) > 1:
            begin_equal(module, layout.group(name))
    if blocks is None:
        # Any other model may read the weights of a child that it does not call.
        computes_by_calls = isinstance(module, nn.Sequential) or any(True for _ in _members_of_lists(module))
        blocks = blocks_of(module) if computes_by_calls else []
    blocks = _without_shared(module, blocks)
    with noting_replaced_parameters(module, "shard()"):
        for block in blocks:
            fully_shard(block, **arguments)
        fully_shard(module, **arguments)
    for dimension in mesh.mesh_dim_names or ():
        ShardedVerification(module, blocks, mesh[dimension].get_group(), layout.sizes.verify)
    cast("Any", module)._accumulates_whole_gradients = stage == 1
    cast("Any", module).is_offloaded = offload
    return module


def check_shardable(module: nn.Module) -> None:
    """Check that all parameters of a module can be divided.

    Raises:
        ParamError: if one is a single number without dimensions or is complex, or an embedding renormalizes its rows.
    """
    for name, layer in module.named_modules():
        if getattr(layer, "max_norm", None) is not None and isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            raise ParamError(
                f"{name!r} is an embedding with max_norm, which changes its rows in the forward pass; shards would "
                "lose the changes. Make it without max_norm, or train replicas (data in place of shard)."
            )
    for name, parameter in module.named_parameters():
        if parameter.ndim == 0:
            raise ParamError(
                f"{name!r} is a parameter without dimensions, which cannot be sharded. Give it the shape (1,)."
            )
        # Optimizers such as AdamW take view_as_real() of a part, which is wrong where parts differ in length.
        if parameter.is_complex() and parameter.requires_grad:
            raise ParamError(
                f"{name!r} is a complex parameter, and optimizers such as AdamW would update its shards "
                "wrongly. Make it a real one with torch.view_as_real, and call torch.view_as_complex in forward; or "
                "train replicas (data in place of shard)."
            )


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: the members of its outermost lists of layers of one type.

    A list is a ``ModuleList`` or a ``Sequential``. A model may have several lists, as in an encoder and a decoder. The
    blocks of a model without such a list are its children that have parameters; a pipeline stage without one has no
    blocks, as it calls only some modules inside of its children.
    """
    blocks = list(_members_of_lists(module))
    if not blocks and not getattr(module, "is_pipeline_stage", False):
        blocks = [
            member
            for child in module.children()
            # A list does not compute, so it cannot be a block itself.
            for member in (child.children() if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child])
            if any(True for _ in member.parameters())
            and not isinstance(member, nn.ParameterList | nn.ParameterDict)
        ]
    return list(dict.fromkeys(blocks))  # a layer may occur several times


def _without_shared(module: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """The blocks that share no parameter with a module outside of them; the others stay with the rest of the model."""

    def uses_in(part: nn.Module) -> Counter[int]:
        return Counter(
            id(parameter)
            for layer in part.modules()
            for parameter in layer._parameters.values()
            if parameter is not None
        )

    uses = uses_in(module)
    return [
        block for block in blocks if all(uses[number] == count for number, count in uses_in(block).items())
    ]


def _members_of_lists(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        members = list(child) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        # One layer in a ModuleList is a block: a pipeline stage may have one. A Sequential of one may be any part.
        is_list = len(members) > 1 or isinstance(child, nn.ModuleList)
        are_equal = is_list and len({type(member) for member in members}) == 1
        if are_equal and all(any(True for _ in member.parameters()) for member in members):
            yield from members
        else:
            yield from _members_of_lists(child)


def recompute_activations(blocks: Iterable[nn.Module]) -> None:
    """Make blocks keep only their inputs for the backward pass, in which they compute their activations again.

    Source: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). The second computation draws the
    same random numbers.
    """
    for block in blocks:
        block.forward = functools.partial(_recompute, block, block.forward)


def _recompute(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # torch.compile does not support these context managers.
    if any(True for _ in block.buffers()) and not torch.compiler.is_compiling():
        # The recomputation begins with the buffers from before the first computation, and its changes of buffers are
        # dropped: a BatchNorm would count each batch twice.
        kwargs["context_fn"] = lambda: (nullcontext(), OtherBuffers(block))
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


class OtherBuffers(AbstractContextManager[None]):
    """Context in which a module has copies of the buffers that it had when this object was made.

    What the module does with its buffers within is dropped. The context can be entered several times.
    """

    def __init__(self, module: nn.Module) -> None:
        copies: dict[Tensor, Tensor] = {}
        self._values: list[tuple[nn.Module, str, Tensor]] = []
        with torch.no_grad():
            for layer in module.modules():
                for name, buffer in layer._buffers.items():
                    if buffer is not None:
                        copy = copies.setdefault(buffer, buffer.clone() if buffer not in copies else buffer)
                        self._values.append((layer, name, copy))

    def __enter__(self) -> None:
        self._own = [(layer, name, layer._buffers[name]) for layer, name, _ in self._values]
        copies: dict[Tensor, Tensor] = {}
        for layer, name, value in self._values:
            if value not in copies:
                copies[value] = value.clone()
            layer._buffers[name] = copies[value]

    def __exit__(self, *_: object) -> None:
        for layer, name, buffer in self._own:
            layer._buffers[name] = buffer


@contextmanager
def accumulated(module: nn.Module) -> Iterator[None]:
    """Context in which backward passes of a sharded module accumulate gradients without reducing them over replicas.

    With stage 1 gradients are not reduced at all; with stages 2 and 3 they are reduce-scattered. The first backward
    pass afterwards reduces the accumulated gradients.
    """
    assert isinstance(module, FSDPModule), "accumulated() takes what shard() returned"
    wait_with: Any = (
        module.set_requires_gradient_sync
        if cast("Any", module)._accumulates_whole_gradients
        else module.set_requires_all_reduce
    )
    wait_with(False)
    try:
        yield
    finally:
        wait_with(True)


def average_gradients(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, *, verify: bool | None = None
) -> None:
    """Average gradients over the ranks of a group, in place. Collective.

    For modules that :func:`shard` does not support: stages of a pipeline whose schedule splits the backward pass.

    Args:
        parameters: parameters, in the same order on all ranks of the group; those without a gradient on any of them are
            skipped, and a missing gradient counts as zero.
        group: process group of the ranks that train on different rows.
        verify: whether the ranks check in every step that their weights are equal; False for never, None for the first
            step of each parameter.

    Raises:
        ParamError: on all ranks, if their weights differ.
    """
    parameters = list(parameters)
    if not parameters:
        return
    check_equal(parameters, group, verify)
    average_gradients_of(parameters, group)


def clip_gradients(module: nn.Module | Sequence[nn.Module], max_norm: float, layout: RankLayout) -> Tensor:
    """Scale all gradients so that their joint 2-norm over all ranks is at most ``max_norm``. Collective.

    Args:
        module: this rank's part of the model; with a pipeline, all stages of this rank.
        max_norm: maximum norm.
        layout: layout of the ranks.

    Returns:
        The norm before scaling, the same on all ranks.
    """
    modules = list_modules(module)
    parameters = [parameter for one in modules for parameter in one.parameters()]
    copies = {parameter for one in modules for parameter in copies_of_tied(one)}  # they count once
    gradients = [
        parameter.grad for parameter in parameters if parameter.grad is not None and parameter not in copies
    ]
    norm = whole_tensor(torch.nn.utils.get_total_norm(gradients))
    if layout.size("pipeline") > 1:
        # In float64 on all ranks: a stage without gradients does not know their dtype.
        squares = norm.to(layout.mesh.device_type).double().square()
        dist.all_reduce(squares, group=layout.group("pipeline"))
        norm = squares.sqrt().to(norm.dtype)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def list_modules(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """This rank's part of a model, or with a pipeline its stages, as a list."""
    return [module] if isinstance(module, nn.Module) else list(module)


def copies_of_tied(module: nn.Module) -> set[Tensor]:
    """The parameters of pipeline stages that are copies of another stage's, such as those of a tied head.

    Args:
        module: a stage, or a module of several stages.
    """
    return {
        parameter
        for layer in module.modules()
        if getattr(layer, "is_elsewhere", False)
        for parameter in layer._parameters.values()
        if parameter is not None
    }


def local_ranges(parameter: Tensor) -> list[tuple[int, int]]:
    """The place of this rank's part in a whole tensor: for each dimension, the first index and the one after the last.

    Args:
        parameter: parameter that :func:`shard` or :func:`~sparkdl.parallel.divide` has placed, or a whole
            tensor.
    """
    ranges = [(0, length) for length in parameter.shape]
    if not isinstance(parameter, DTensor):
        return ranges
    mesh = parameter.device_mesh
    coordinates = mesh.get_coordinate()
    assert coordinates is not None, "this rank has a part"
    # Tensor parallelism divides first, and its dimension of the mesh is the last.
    for dim in reversed(range(mesh.ndim)):
        along = getattr(parameter.placements[dim], "dim", None)
        if along is not None:
            first, end = ranges[along]
            length = -(-(end - first) // mesh.size(dim))  # as torch.chunk cuts
            start = min(end, first + coordinates[dim] * length)
            ranges[along] = (start, min(end, start + length))
    return ranges
