"""Averages of compressed gradients, with error feedback: what a rank does not send now, it adds to its next gradient.

:class:`~sparkdl.torch.data_parallel.DataParallel` hands over each bucket of gradients as soon as it is complete, so
that buckets are compressed and sent while others are still computed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparkdl.slow_links import Compression, PowerSGD, TopK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sparkdl.collective import Communicator, Handle
    from sparkdl.torch.data_parallel import Bucket

_COMPRESSED = (torch.float32, torch.float64)
"""Gradients of other dtypes are sent as they are."""

_LEAST_GAIN = 2
"""Two thin matrices replace a matrix if they have less than half of its elements, as in torch's ``powerSGD_hook``."""


class GradientCompressor(ABC):
    """Averages buckets of gradients over the ranks in some compressed form.

    Args:
        begin_after: number of updates with uncompressed gradients before the first compressed one.
        communicator: communicator of the ranks.

    Attributes:
        errors: what this rank has not sent yet of the gradient of each parameter.
    """

    def __init__(self, begin_after: int, communicator: Communicator) -> None:
        self._begin_after, self._communicator = begin_after, communicator
        self._num_updates = 0
        self._active: list[tuple[Iterator[Handle], Handle]] = []
        self.errors: dict[nn.Parameter, Tensor] = {}

    def lay_out(self, buckets: Sequence[Bucket]) -> None:  # noqa: B027  # one form needs no memory of a whole bucket
        """Prepare for these buckets, which replace earlier ones."""

    def start(self, bucket: Bucket) -> Handle:
        """Begin to average a bucket; :meth:`finish` ends it. Collective."""
        is_plain = bucket.dtype not in _COMPRESSED or self._num_updates < self._begin_after
        with torch.no_grad():
            if is_plain:
                steps = iter([self._communicator.allreduce_async(bucket.elements, op="avg")])
            else:
                steps = self._reduce(bucket)
            handle = next(steps)
        self._active.append((steps, handle))
        return handle

    def finish(self) -> None:
        """Wait until the buckets hold the averages. Collective."""
        with torch.no_grad():
            while self._active:
                active, self._active = self._active, []
                for steps, handle in active:
                    handle.wait()
                    following = next(steps, None)
                    if following is not None:
                        self._active.append((steps, following))
        self._num_updates += 1

    def reset(self) -> None:
        """Forget the buckets of a backward pass that has failed."""
        self._active.clear()

    @abstractmethod
    def _reduce(self, bucket: Bucket) -> Iterator[Handle]:
        """Average a bucket, in place; yield each collective after its start, and go on when it is complete."""

    def state_dict(self, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
        """Return the state of this rank; tensors by the names of parameters."""
        return {
            "num_updates": self._num_updates,
            "errors": {names[parameter]: error for parameter, error in self.errors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> None:
        """Continue from what :meth:`state_dict` returned on this rank."""
        self._num_updates = state["num_updates"]
        for name, error in state["errors"].items():
            parameter = parameters[name]
            self.errors.setdefault(parameter, torch.zeros_like(error)).copy_(error)


def compressor_for(settings: Compression, communicator: Communicator) -> GradientCompressor:
    """Return the compressor that carries out settings."""
    if isinstance(settings, PowerSGD):
        return _LowRank(settings, communicator)
    return _Largest(settings, communicator)


class _LowRank(GradientCompressor):
    """Carries out :class:`~sparkdl.slow_links.PowerSGD`."""

    def __init__(self, settings: PowerSGD, communicator: Communicator) -> None:
        super().__init__(settings.begin_after, communicator)
        self._rank = settings.rank
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._right: dict[nn.Parameter, Tensor] = {}
        """The right one of the two thin matrices, equal on all ranks, with which the next power iteration begins."""

    def _reduce(self, bucket: Bucket) -> Iterator[Handle]:
        matrices = {
            parameter: place.view(len(place), -1)
            for parameter, place in bucket.gradients.items()
            if self._is_matrix(place)
        }
        for parameter, matrix in matrices.items():
            self._take_in(parameter, matrix)
        others = [place for parameter, place in bucket.gradients.items() if parameter not in matrices]
        rest = torch.cat([*(place.reshape(-1) for place in others), bucket.presence])
        left = _stack([self.errors[parameter] @ self._right[parameter] for parameter in matrices], rest)
        yield self._communicator.allreduce_group_async([left, rest], op="avg")
        sizes = [*(place.numel() for place in others), len(bucket.presence)]
        for place, part in zip((*others, bucket.presence), rest.split(sizes), strict=True):
            place.copy_(part.view(place.shape))
        # Copies, whose memory begins at the same alignment on all ranks, as a BLAS may round by it.
        shapes = [(len(matrix), self._right[parameter].shape[1]) for parameter, matrix in matrices.items()]
        bases = [torch.linalg.qr(part.clone())[0] for part in _unstack(left, shapes)]
        right = _stack(
            [self.errors[parameter].t() @ basis for parameter, basis in zip(matrices, bases, strict=True)],
            rest,
        )
        yield self._communicator.allreduce_async(right, op="avg")
        is_there = dict(zip(bucket.gradients, bucket.presence.tolist(), strict=True))
        shapes = [
            (matrix.shape[1], self._right[parameter].shape[1]) for parameter, matrix in matrices.items()
        ]
        for (parameter, matrix), basis, part in zip(
            matrices.items(), bases, _unstack(right, shapes), strict=True
        ):
            self._right[parameter].copy_(part)
            approximation = basis @ self._right[parameter].t()
            matrix.copy_(approximation)
            if is_there[parameter]:  # else the parameter gets no gradient
                self.errors[parameter].sub_(approximation)

    def _is_matrix(self, place: Tensor) -> bool:
        if place.dim() < 2 or not place.numel():
            return False
        num_rows, num_columns = len(place), place.numel() // len(place)
        return (num_rows + num_columns) * self._rank * _LEAST_GAIN < num_rows * num_columns

    def _take_in(self, parameter: nn.Parameter, matrix: Tensor) -> None:
        """Add a gradient to what is left to send."""
        if parameter not in self.errors:
            self.errors[parameter] = torch.zeros_like(matrix)
        if parameter not in self._right:
            drawn = torch.randn(matrix.shape[1], self._rank, generator=self._generator, dtype=matrix.dtype)
            self._right[parameter] = torch.linalg.qr(drawn)[0].contiguous()
        self.errors[parameter].add_(matrix)

    def state_dict(self, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
        """Return the state of this rank, with the thin matrices."""
        right = {names[parameter]: matrix for parameter, matrix in self._right.items()}
        return {**super().state_dict(names), "right": right, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> None:
        """Continue from what :meth:`state_dict` returned on this rank."""
        super().load_state_dict(state, parameters)
        self._right = {parameters[name]: matrix.clone() for name, matrix in state["right"].items()}
        self._generator.set_state(state["generator"])


def _stack(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts]) if parts else like.new_empty(0)


def _unstack(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes]) if shapes else ()
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class _Largest(GradientCompressor):
    """Carries out :class:`~sparkdl.slow_links.TopK`."""

    def __init__(self, settings: TopK, communicator: Communicator) -> None:
        super().__init__(settings.begin_after, communicator)
        self._ratio = settings.ratio
        self._flat: dict[Bucket, Tensor] = {}
        """What is left to send of each bucket; ``errors`` are views of it."""

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Make room for what is left to send of each bucket."""
        before, self.errors, self._flat = self.errors, {}, {}
        for bucket in buckets:
            if bucket.dtype not in _COMPRESSED:
                continue
            flat = self._flat[bucket] = torch.zeros_like(bucket.elements[: bucket.num_elements])
            for parameter, place in bucket.gradients.items():
                first = place.storage_offset() - bucket.elements.storage_offset()
                error = self.errors[parameter] = flat[first : first + place.numel()].view(place.shape)
                if parameter in before:
                    error.copy_(before[parameter])

    def _reduce(self, bucket: Bucket) -> Iterator[Handle]:
        left, presence = self._flat[bucket], bucket.presence
        left.add_(bucket.elements[: len(left)])
        num_sent = math.ceil(self._ratio * sum(place.numel() for place in bucket.gradients.values()))
        chosen = left.abs().topk(num_sent, sorted=False).indices
        index_dtype = torch.int32 if bucket.dtype == torch.float32 else torch.int64  # of the same size
        parts = [left[chosen], presence, chosen.to(index_dtype)]
        block = torch.cat([part.view(torch.uint8) for part in parts])
        world_size = self._communicator.world_size
        blocks = block.new_empty(world_size, len(block))
        yield self._communicator.allgather_async(block, blocks.view(-1))
        bucket.elements.zero_()
        sizes = [len(part) * bucket.dtype.itemsize for part in parts]
        for of_rank in blocks:  # in the order of the ranks, so that all add up alike
            values, is_there, indices = of_rank.split(sizes)
            bucket.elements.index_add_(
                0, indices.view(index_dtype).to(torch.int64), values.view(bucket.dtype)
            )
            presence.add_(is_there.view(bucket.dtype))
        bucket.elements.div_(world_size)
        absent = [
            self.errors[parameter]
            for parameter, share in zip(bucket.gradients, presence.tolist(), strict=True)
            if not share
        ]
        kept = [error.clone() for error in absent]  # as these parameters get no gradient
        left[chosen] = 0
        for error, before in zip(absent, kept, strict=True):
            error.copy_(before)
