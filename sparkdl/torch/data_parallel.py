"""Data parallelism on the CPU: gradients are averaged in place while the backward pass still runs.

Unlike ``torch.nn.parallel.DistributedDataParallel`` it needs only a communicator: it has no process group, no copies of
gradients to buckets, and no search for unused parameters. The gradients of the module's parameters, which must be on
the CPU, lie in memory that is divided into buckets and that collectives reduce without copies.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import nn

from sparkdl.errors import ParamError
from sparkdl.torch.buffers import ELEMENT_DTYPES, movable, plain_parts, restore
from sparkdl.torch.compression import compressor_for
from sparkdl.torch.replicas import LiveParameters

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

    from sparkdl.collective import Communicator, Handle
    from sparkdl.slow_links import Compression


_ALIGNMENT_BYTES = 64
"""Gradients begin at cache lines, so that no two ranks write to the same line."""


_PART_BYTES = 16 << 20
_MAX_PARTS = 8


@dataclass(frozen=True, eq=False)
class Bucket:
    """Gradients that are reduced as one operation.

    Attributes:
        elements: all gradients, flat, followed by ``presence``; complex numbers as pairs.
        gradients: view of ``elements`` for each parameter, of the parameter's shape.
        presence: view of ``elements`` with one entry per parameter: one if this rank contributes to the gradient, else
            zero. The average over the ranks shows whether any rank contributes, without another collective.
    """

    elements: Tensor
    gradients: dict[nn.Parameter, Tensor]
    presence: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradients."""
        return self.presence.dtype

    @property
    def num_elements(self) -> int:
        """Number of elements of all gradients with their padding, without ``presence``; a complex number is two."""
        return int(self.presence.storage_offset() - self.elements.storage_offset())


def make_buckets(
    parameters: Iterable[nn.Parameter], communicator: Communicator, *, bucket_bytes: int
) -> list[Bucket]:
    """Lay out a gradient for each parameter, in reverse order, which is roughly that of the backward pass.

    All ranks call this with parameters of the same shapes and dtypes.

    Raises:
        ParamError: if a parameter is not on the CPU.
        CommunicatorError: if the memory cannot be allocated.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
    for parameter in reversed(list(parameters)):
        if parameter.device.type != "cpu":
            raise ParamError(
                f"Gradients on {parameter.device} cannot lie in memory that ranks share. Move the module to the CPU, "
                "or use DistributedDataParallel."
            )
        by_dtype[parameter.dtype].append(parameter)
    return [
        bucket
        for dtype, members in by_dtype.items()
        for bucket in _lay_out(members, dtype, communicator, bucket_bytes)
    ]


def _lay_out(
    parameters: Sequence[nn.Parameter], dtype: torch.dtype, communicator: Communicator, bucket_bytes: int
) -> list[Bucket]:
    unit = _ALIGNMENT_BYTES // dtype.itemsize
    groups: list[list[nn.Parameter]] = [[]]
    num_bytes = 0
    for parameter in parameters:
        if num_bytes >= bucket_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(parameter)
        num_bytes += _align(parameter.numel(), unit) * dtype.itemsize
    sizes = [
        sum(_align(parameter.numel(), unit) for parameter in group) + _align(len(group), unit)
        for group in groups
    ]
    buckets: list[Bucket] = []
    for group, part in zip(groups, _allocate(sizes, dtype, communicator), strict=True):
        end = 0
        gradients: dict[nn.Parameter, Tensor] = {}
        for parameter in group:
            gradients[parameter] = part[end : end + parameter.numel()].view(parameter.shape)
            end += _align(parameter.numel(), unit)
        buckets.append(Bucket(movable(part), gradients, part[end : end + len(group)]))
    return buckets


def _allocate(sizes: Sequence[int], dtype: torch.dtype, communicator: Communicator) -> Iterator[Tensor]:
    """Yield memory for buckets of these numbers of elements; what shared memory cannot hold lies outside of it.

    Shared memory is taken in up to eight parts, so that a small one is used as far as possible.
    """
    part_size = max(_PART_BYTES // dtype.itemsize, -(-sum(sizes) // _MAX_PARTS))
    parts: list[list[int]] = [[]]
    for size in sizes:
        if sum(parts[-1]) >= part_size:
            parts.append([])
        parts[-1].append(size)
    for part in parts:
        memory = communicator.allocate(sum(part) * dtype.itemsize)
        yield from torch.from_numpy(memory).view(dtype).split(part)


def _align(count: int, unit: int) -> int:
    return -(-count // unit) * unit


_BUCKET_BYTES = 4 << 20
"""Small enough that most of the gradients are sent while others are still computed."""


class _BackwardPass:
    """State of a backward pass. Apart from the module, as setting an attribute of a module is slow."""

    __slots__ = ("_num_gradients", "handles", "has_begun", "num_missing")

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._num_gradients = [len(bucket.gradients) for bucket in buckets]
        self.reset()

    def reset(self) -> None:
        self.has_begun = False
        self.num_missing = [*self._num_gradients]
        self.handles: list[Handle] = []


class DataParallel(nn.Module):
    """Wraps a module so that after the backward pass every rank has the average of the ranks' gradients.

    The constructor broadcasts rank 0's parameters and buffers to all ranks; each forward pass in training broadcasts
    the buffers again, except inside of :meth:`no_sync`. A parameter that took part on no rank keeps the gradient that
    it had, or None.

    Layers may be added, replaced, frozen and unfrozen at any time, equally on all ranks: the next forward pass
    broadcasts rank 0's values of new parameters, and gradients of all that are trained then are averaged.

    Gradients lie in memory that the ranks share, if all are on one host. After ``zero_grad()``, autograd creates new
    ones, which are copied there. ``zero_grad(set_to_none=False)`` leaves them there, but is slower: zeros and
    sums take more memory traffic than that copy.

    Until :meth:`close` it averages the gradients of every backward pass that reaches the module's parameters.

    Args:
        module: module on the CPU, of the same architecture on every rank.
        communicator: open communicator of the ranks; the caller closes it.
        bucket_bytes: approximate number of bytes of gradients that are reduced as one operation.
        broadcast_buffers: whether rank 0's buffers are sent before each forward pass in training.
        compression: how gradients are compressed for slow links; None to average them as they are. Each backward pass
            that averages counts as an update.

    Raises:
        ParamError: if a parameter is not on the CPU, or has gradients that cannot be averaged, such as those of
            float8; from a backward pass, if a gradient is sparse, as that of ``nn.Embedding(sparse=True)`` is, or has a
            graph (``create_graph=True``).
        CommunicatorError: if the memory for the gradients cannot be allocated.
    """

    def __init__(
        self,
        module: nn.Module,
        communicator: Communicator,
        *,
        bucket_bytes: int = _BUCKET_BYTES,
        broadcast_buffers: bool = True,
        compression: Compression | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._communicator = communicator
        self._compressor = None if compression is None else compressor_for(compression, communicator)
        self._averages = True
        self._uncounted: frozenset[nn.Parameter] = frozenset()
        self._bucket_bytes, self._broadcasts_buffers = bucket_bytes, broadcast_buffers
        self._live = LiveParameters(module)
        check_trainable(module)
        broadcast_tensors([*self._live.parameters, *self._live.buffers()], communicator)
        self._sent = set(self._live.parameters)
        # The garbage collector does not see the hooks that autograd holds: a hook with a permanent reference to this
        # object would keep it and the parameters alive for ever. So hooks refer to it only from a forward pass to the
        # end of the backward pass.
        self._held: list[DataParallel] = []
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}
        self._lay_out([parameter for parameter in self._live.parameters if parameter.requires_grad])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output."""
        if self._pass.has_begun:  # a backward pass that has failed
            self._pass.reset()
            if self._compressor is not None:
                self._compressor.reset()
        with_gradients = torch.is_grad_enabled()
        if with_gradients:
            self._held[:] = [self]
            self.take_up_changes()
        if self._broadcasts_buffers and self._averages and self.training:
            broadcast_tensors(self._live.buffers(), self._communicator)
        output = self.module(*args, **kwargs)
        if with_gradients:
            self.take_up_changes()  # that the module itself has made
        return output

    def take_up_changes(self) -> None:
        """Broadcast rank 0's values of parameters that are new, and average gradients of all that are trained now.

        Each forward pass with gradients calls this. Collective if the module has changed.
        """
        if not self._live.look():
            return
        new = [parameter for parameter in self._live.parameters if parameter not in self._sent]
        broadcast_tensors(new, self._communicator, name="new parameters of the module")
        self._sent = set(self._live.parameters)
        if any(
            parameter.requires_grad and parameter not in self._hooks for parameter in self._live.parameters
        ):
            check_trainable(self.module)
            laid_out = {parameter for bucket in self._buckets for parameter in bucket.gradients}
            # Frozen parameters keep their place: only some ranks may have frozen them.
            self._lay_out(
                [
                    parameter
                    for parameter in self._live.parameters
                    if parameter.requires_grad or parameter in laid_out
                ]
            )

    def close(self) -> None:
        """Stop averaging the module's gradients, so that the module may be wrapped again."""
        self._remove_hooks()
        self._held.clear()

    def compression_state(self) -> dict[str, Any]:
        """Return this rank's state of the compression, with what is left to send; empty without compression."""
        if self._compressor is None:
            return {}
        return self._compressor.state_dict(
            {parameter: name for name, parameter in self.module.named_parameters()}
        )

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`compression_state` returned on this rank."""
        if self._compressor is not None and state:
            self._compressor.load_state_dict(state, dict(self.module.named_parameters()))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In this context, backward passes accumulate local gradients; the first one after it averages the sums."""
        before, self._averages = self._averages, False
        try:
            yield
        finally:
            self._averages = before

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """In this context, a backward pass takes part in the averaging, but gives no parameter a gradient.

        It is for a rank without rows, whose gradients are zero: a parameter that has no gradient yet gets one only if
        it took part on another rank. An optimizer would treat a gradient of zero differently from None.
        """
        self.take_up_changes()
        self._uncounted = frozenset(
            gradient for bucket in self._buckets for gradient in bucket.gradients if gradient.grad is None
        )
        try:
            yield
        finally:
            if not self._averages:
                for parameter in self._uncounted:
                    parameter.grad = None
            self._uncounted = frozenset()

    def _lay_out(self, parameters: list[nn.Parameter]) -> None:
        self._remove_hooks()
        self._buckets = make_buckets(parameters, self._communicator, bucket_bytes=self._bucket_bytes)
        self._pass = _BackwardPass(self._buckets)
        if self._compressor is not None:
            self._compressor.lay_out(self._buckets)
        take = partial(_call, WeakMethod(self._on_gradient), self._held)
        self._hooks = {
            parameter: parameter.register_post_accumulate_grad_hook(partial(take, index))
            for index, bucket in enumerate(self._buckets)
            for parameter in bucket.gradients
            if parameter.requires_grad
        }

    def _remove_hooks(self) -> None:
        for hook in self._hooks.values():
            hook.remove()

    def _on_gradient(self, index: int) -> None:
        """Handle a gradient that autograd has computed, of a parameter in the bucket of this index."""
        if not self._averages:
            return
        current = self._pass
        if not current.has_begun:
            if torch.is_grad_enabled():
                raise ParamError(
                    "backward(create_graph=True) under DataParallel: an average over ranks has no graph to "
                    "differentiate. Compute inner derivatives with torch.autograd.grad(..., create_graph=True), and "
                    "call backward() without create_graph for the loss that uses them."
                )
            current.has_begun = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if index < len(self._buckets) - 1:
            current.num_missing[index] -= 1
            self._reduce_complete_buckets(current)

    def _reduce_complete_buckets(self, current: _BackwardPass) -> None:
        # In the order of the buckets, which is the same on all ranks, whatever the order of the gradients. Not the last
        # bucket, as nothing is left to compute meanwhile: _finish reduces it on its own thread and wakes no other one.
        while (index := len(current.handles)) < len(self._buckets) - 1 and current.num_missing[index] <= 0:
            self._settle(self._buckets[index])
            self._start_allreduce(self._buckets[index], current)

    def _settle(self, bucket: Bucket) -> bool:
        try:
            return _move_into(bucket, self._uncounted)
        except RuntimeError:
            # Sparse tensors have no data pointer. Looking for them beforehand would cost time for every gradient.
            self._refuse_sparse(bucket)
            raise

    def _refuse_sparse(self, bucket: Bucket) -> None:
        for name, parameter in self.module.named_parameters():
            gradient = parameter.grad
            if parameter in bucket.gradients and gradient is not None and gradient.layout != torch.strided:
                raise ParamError(
                    f"the gradient of parameter {name!r} is sparse ({gradient.layout}), and DataParallel cannot average"
                    " sparse gradients. Make its module without sparse=True."
                ) from None

    def _start_allreduce(self, bucket: Bucket, current: _BackwardPass) -> None:
        if self._compressor is not None:
            current.handles.append(self._compressor.start(bucket))
        else:
            current.handles.append(self._communicator.allreduce_async(bucket.elements, op="avg"))

    def _finish(self) -> None:
        """End the backward pass: reduce the remaining buckets, and wait for all reductions."""
        lacking: list[Bucket] = []
        current = self._pass
        for index in range(len(current.handles), len(self._buckets)):
            bucket = self._buckets[index]
            if not self._settle(bucket):
                lacking.append(bucket)
            if index < len(self._buckets) - 1 or self._compressor is not None:
                self._start_allreduce(bucket, current)
            else:
                self._communicator.allreduce(bucket.elements, op="avg")
        if self._compressor is not None:
            self._compressor.finish()
        else:
            for handle in current.handles:
                handle.wait()
        for bucket in lacking:
            for (parameter, gradient), on_some_rank in zip(
                bucket.gradients.items(), bucket.presence.tolist(), strict=True
            ):
                if not on_some_rank:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = gradient
        current.reset()
        self._held.clear()


def _move_into(bucket: Bucket, uncounted: Container[nn.Parameter]) -> bool:
    """Move all gradients into their bucket, with zeros for missing ones; return whether none is missing or uncounted.

    Gradients may also be left from a backward pass without averaging.
    """
    has_all = True
    bucket.presence.fill_(1)
    places: list[Tensor] = []
    tensors: list[Tensor] = []
    for index, (parameter, place) in enumerate(bucket.gradients.items()):
        gradient = parameter.grad
        if gradient is None:
            has_all = False
            place.zero_()
            bucket.presence[index] = 0
        elif gradient.data_ptr() != place.data_ptr():
            places.append(place)
            tensors.append(gradient)
            parameter.grad = place
        if parameter in uncounted:
            has_all = False
            bucket.presence[index] = 0
    if places:
        torch._foreach_copy_(places, tensors)
    return has_all


def _call(method: WeakMethod[Any], _held: list[DataParallel], index: int, _: Tensor) -> None:
    take = method()
    if take is not None:
        take(index)


def check_trainable(module: nn.Module) -> None:
    """Check that ranks can average the gradients of all trainable parameters.

    Raises:
        ParamError: if they cannot; the message names the parameter.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and (
            parameter.layout != torch.strided
            or not (parameter.dtype in ELEMENT_DTYPES or parameter.is_complex())
        ):
            raise ParamError(
                f"The ranks cannot average gradients of parameter {name!r} ({parameter.dtype}, {parameter.layout}). "
                "Freeze it by requires_grad_(False), convert it to a dense tensor of a wider dtype, or use one rank."
            )


def broadcast_tensors(tensors: Iterable[Tensor], communicator: Communicator, name: str = "") -> None:
    """Overwrite tensors in place with rank 0's values. Collective."""
    parts = [part for tensor in tensors for part in plain_parts(tensor)]
    with torch.no_grad():
        sent = [(part, movable(part).to("cpu")) for part in parts]  # a communicator takes no memory of GPUs
        handles = [communicator.broadcast_async(values, root=0, name=name) for _, values in sent]
        for handle in handles:
            handle.wait()
        for part, values in sent:
            restore(values, part)
