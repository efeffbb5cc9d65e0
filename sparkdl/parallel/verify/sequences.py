"""The checks of models whose ranks share the positions of sequences."""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from sparkdl.errors import ParamError
from sparkdl.model.architecture import evaluating
from sparkdl.parallel.verify.sketches import (
    GRADIENTS,
    MOST_ROUNDING,
    MOST_ROUNDING_OF_16_BITS,
    check_rows,
    differing,
    sketch,
)
from sparkdl.parallel.verify.verification import (
    Verification,
    outputs_with_gradients,
    paused,
    verifications_of,
)
from sparkdl.patches.compiler import not_compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sparkdl.parallel.context import SharedAttention

NAMES_OF_POSITIONS = ("positions", "position_ids")
"""Names of the arguments for the numbers of positions."""

_sharing: weakref.WeakValueDictionary[dist.ProcessGroup, Verification] = weakref.WeakValueDictionary()
"""The verification of the model that shares sequences among the ranks of a group; it lives as long as the model."""

_known_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""The groups that had such a model, or compared sequences without one. Ranks forget a model at different times. Names
of groups come again in the next launch of a process."""


def check_shared_rows(tensor: Tensor, group: dist.ProcessGroup, verify: bool | None) -> None:
    """Check that the ranks which share a sequence hold the same sequence. Collective if it is due.

    Args:
        tensor: the whole sequence.
        group: process group of the ranks that share it.
        verify: whether it is due: always (True), never (False), or while the model of
            :func:`~sparkdl.parallel.share_sequences` is verified (None). Without such a model, None stands for the
            first call.

    Raises:
        ParamError: on all ranks, if they hold different sequences.
    """
    verification = _sharing.get(group)
    is_first = group not in _known_groups
    if verify or (verify is None and (is_first or (verification is not None and verification.is_due))):
        check_rows("context", [[tensor]], group)
        _known_groups.add(group)


class SequenceVerification(Verification):
    """Checks that a model gets the numbers of its positions, and that its attention is computed over shared sequences.

    Otherwise each rank would count positions from 0, or attend only to its own part of sequences.

    Args:
        module: a module of :func:`sparkdl.parallel.share_sequences`.
        group: process group of the ranks that share sequences.
        attention: the attention that its layers call.
        verify: see :class:`Verification`.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        attention: SharedAttention,
        verify: bool | None,
    ) -> None:
        super().__init__(module, group, verify)
        self._attention = attention
        _sharing[group] = self
        _known_groups.add(group)

    def check_positions(
        self, module: nn.Module, positions: Tensor, positions_of_rank: Callable[[int], Tensor]
    ) -> None:
        """Check that a model of Hugging Face gets the numbers of this rank's positions, in the steps that are verified.

        Args:
            module: the model.
            positions: the numbers that it got.
            positions_of_rank: function that returns this rank's positions in a sequence of a length.
        """
        if not self.is_due:
            return
        wanted = positions_of_rank(positions.shape[-1] * dist.get_world_size(self._group))
        if not torch.equal(positions, wanted.expand_as(positions)):
            raise ParamError(
                f"{type(module).__name__} got position_ids that are not those of this rank's part of the sequence, "
                "which Hugging Face's models take for packed texts. Pack texts by documents=, the number of the text "
                "of each position, and give sparkdl.parallel.sequence.positions(length, group) as position_ids."
            )

    @not_compiled
    def _begin_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        signature = inspect.signature(module.forward)
        name = next((name for name in NAMES_OF_POSITIONS if name in signature.parameters), None)
        if name is not None and signature.bind_partial(*args, **kwargs).arguments.get(name) is None:
            raise ParamError(
                f"{type(module).__name__} shares sequences among ranks and got no {name}, so that it would count "
                "positions from 0 on each rank. Give it sparkdl.parallel.sequence.positions(length, group)."
            )

    @not_compiled
    def _end_call(self, module: nn.Module, output: Any) -> None:
        # A stage of a pipeline may have no layer with attention.
        if not self._attention.was_called and not self._is_stage:
            raise ParamError(
                f"{type(module).__name__} computes no attention that can be shared: none of its layers called "
                "torch.nn.functional.scaled_dot_product_attention, or what Hugging Face's models call in its place. "
                "Each rank would attend to its own part of a sequence alone. Use no context parallelism for it."
            )
        super()._end_call(module, output)


_NUM_POSITIONS = 8
"""Positions per chunk of the comparison of whole sequences with shared ones: each rank has two chunks."""


class WholeSequenceVerification(Verification):
    """Checks that a model computes on shared sequences what it computes on whole ones, and that losses are equal.

    Args:
        module: the wrapper that takes and returns whole sequences.
        group: process group of the ranks that share sequences.
        compute_alone: function that computes the output for whole sequences on this rank alone; None if the model
            cannot.
        positions_dim: dimension of positions in the outputs.
        verify: see :class:`Verification`.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        compute_alone: Callable[..., Any] | None,
        positions_dim: int,
        verify: bool | None,
    ) -> None:
        super().__init__(module, group, verify, dimension="context")
        self._compute_alone, self._positions_dim = compute_alone, positions_dim
        self._gradients: dict[int, Tensor | None] = {}

    @not_compiled
    def _begin_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._begin_call(module, args, kwargs)
        if self._is_stage or self._compute_alone is None or not torch.is_grad_enabled():
            return
        if self.begins("sequences"):
            self._compare_sequences(module, args, kwargs, self._compute_alone)

    def _compare_sequences(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        compute_alone: Callable[..., Any],
    ) -> None:
        """Compare the outputs for the beginning of a row with those of the whole beginning on each rank.

        Raises:
            ParamError: if they differ at more than a few positions, as rounding may decide between experts: something
                else than the shared attention works on several positions.
        """
        most = _NUM_POSITIONS * 2 * dist.get_world_size(self._group)

        def beginning(value: Any) -> Any:
            is_sequence = isinstance(value, Tensor) and value.ndim > 1
            return value[:1, :most].clone() if is_sequence else value

        args, kwargs = tree_map(beginning, (args, dict(kwargs)))
        with evaluating(module), paused(verifications_of(module)):
            pairs = zip(
                tree_leaves(module.forward(*args, **kwargs)),
                tree_leaves(compute_alone(*args, **kwargs)),
                strict=True,
            )
        if any(
            isinstance(shared, Tensor) and _differ_at_positions(shared, alone, self._positions_dim)
            for shared, alone in pairs
        ):
            raise ParamError(
                f"{type(module.module).__name__} computes another result when ranks share its sequences: beside "
                "attention that can be shared, a layer works on several positions, such as a convolution, a sum over "
                "positions, or attention written by hand. Use no context parallelism for it."
            )

    @not_compiled
    def _end_call(self, module: nn.Module, output: Any) -> None:
        # Earlier stages of a pipeline get gradients of this rank's positions alone.
        if getattr(module, "is_last_stage", True):
            for number, tensor in enumerate(outputs_with_gradients(output)):
                if self.begins(f"gradient {number}"):
                    self._gradients[number] = None
                    tensor.register_hook(  # type: ignore[no-untyped-call]  # of torch
                        functools.partial(self._note_gradient, number)
                    )
        super()._end_call(module, output)

    def _note_gradient(self, number: int, gradient: Tensor) -> None:
        if number in self._gradients:
            self._gradients[number] = sketch(gradient, GRADIENTS)

    def _compare_step(self, _: bool) -> None:
        gradients, self._gradients = [*self._gradients.values()], {}
        if any(differing(gradients, self._group)):
            raise ParamError(
                "The context-parallel ranks of a group computed different gradients of the same outputs. Give them the "
                "same labels and weights of rows, and compute the loss without random numbers."
            )


def _differ_at_positions(shared: Tensor, whole: Tensor, dim: int) -> bool:
    if not whole.is_floating_point() or not whole.numel():
        return False
    difference = (shared - whole).abs().transpose(0, dim).flatten(1).amax(1)
    is_wide = whole.dtype in (torch.float32, torch.float64)
    rounding, share = (MOST_ROUNDING, 0.05) if is_wide else (MOST_ROUNDING_OF_16_BITS, 0.25)
    return bool((difference > rounding * whole.abs().max()).double().mean() > share)
