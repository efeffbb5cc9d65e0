"""Context parallelism: a model's attention computed over sequences whose positions are divided among ranks.

:func:`share_sequences` makes a model's attention work on the parts of sequences that :mod:`sparkdl.parallel.sequence`
gives to the ranks. Everything else in a decoder works position by position.
"""

from __future__ import annotations

import functools
import inspect
import threading
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparkdl.errors import ParamError
from sparkdl.foreign_errors import errors_as
from sparkdl.model.inputs import positions_in
from sparkdl.parallel import sequence
from sparkdl.parallel.attention import all_to_all_attention, ring_attention, whole_attention
from sparkdl.parallel.collectives import Paired, apply
from sparkdl.parallel.parallelism import ATTENTION_METHODS
from sparkdl.parallel.verify.sequences import (
    NAMES_OF_POSITIONS,
    SequenceVerification,
    WholeSequenceVerification,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_ATTENTION = dict(zip(ATTENTION_METHODS, (ring_attention, all_to_all_attention), strict=True))


def share_sequences(
    module: nn.Module, group: dist.ProcessGroup, *, method: str = "ring", verify: bool | None = None
) -> nn.Module:
    """Make a model compute attention over sequences whose positions are divided among ranks, in place.

    Afterwards the model takes this rank's part of each sequence and, if it embeds positions, their numbers, as returned
    by :func:`sparkdl.parallel.sequence.positions`. Three kinds of models are supported:

    - models whose layers have a function ``attend``, such as :class:`sparkdl.networks.decoder.Decoder`;
    - Hugging Face models, also inside of other modules, whose attention implementation is set, and which then take
      ``documents=`` as :func:`~sparkdl.parallel.attention.ring_attention` does;
    - any other model that calls :func:`torch.nn.functional.scaled_dot_product_attention`, without a mask and without
      dropout.

    Args:
        module: the model.
        group: process group of the ranks that share sequences, such as ``layout.group("context")``.
        method: ``"ring"``, whose memory falls with the number of ranks and which takes any number of heads, or
            ``"all-to-all"``, which sends less and needs a number of heads that is a multiple of the number of ranks.
        verify: whether each call checks that the model gets the numbers of its positions and computes its attention
            over shared sequences; False for never, None for the first step.

    Returns:
        ``module``.

    Raises:
        ParamError: if there is no such method, or the model has layers of a type that is not supported. In the first
            step, if the model does not get the numbers of its positions, or computes no attention that can be shared.
    """
    if method not in ATTENTION_METHODS:
        raise ParamError(
            f"The method of context parallelism must be {' or '.join(map(repr, ATTENTION_METHODS))}, got {method!r}."
        )
    attention = SharedAttention(functools.partial(_ATTENTION[method], group=group))
    with_attend: list[Any] = [layer for layer in module.modules() if callable(getattr(layer, "attend", None))]
    of_hugging_face = next(
        (layer for layer in module.modules() if hasattr(layer, "set_attn_implementation")), None
    )
    verification = SequenceVerification(module, group, attention, verify)
    if with_attend:
        for layer in with_attend:
            layer.attend = _causal(attention)
    elif of_hugging_face is not None:
        implementation = _HuggingFaceAttention(attention, group, verification)
        implementation.attach(of_hugging_face, f"sparkdl-{method}-{group.group_name}")
    else:
        for layer in module.modules():
            # A hook would not run when a block is recomputed.
            layer.forward = functools.update_wrapper(
                functools.partial(_call_in_mode, attention, layer.forward), layer.forward
            )
    cast("Any", module).shared_attention = attention
    return module


class SharedAttention:
    """Attention over shared sequences, which the layers of a model call.

    Args:
        compute: function that computes it.

    Attributes:
        is_whole: whether it is computed over whole sequences on this rank alone at the moment.
        was_called: whether a layer has called it.
    """

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        self._compute = compute
        self.is_whole = self.was_called = False

    def __reduce__(self) -> Any:  # a process group is not copied
        return SharedAttention, (whole_attention,)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the attention of a layer."""
        self.was_called = True
        return (whole_attention if self.is_whole else self._compute)(*args, **kwargs)


def _causal(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        return attention(query, key, value, is_causal=True, documents=documents)

    return attend


class _HuggingFaceAttention:
    """An attention implementation in the registry of Hugging Face's transformers, over shared sequences."""

    _changes = ("softcap", "s_aux", "sinks", "position_bias", "head_mask", "indices", "block_indices")
    """Arguments of an implementation that change what it computes, and that are not supported here."""

    def __init__(
        self,
        attention: SharedAttention,
        group: dist.ProcessGroup | None,
        verification: SequenceVerification | None,
    ) -> None:
        self._attention, self._group, self._verification = attention, group, verification
        self._has_documents = False

    def __reduce__(self) -> Any:  # a process group is not copied
        return _HuggingFaceAttention, (self._attention, None, None)

    def attach(self, module: Any, name: str) -> None:
        """Make a model call this implementation.

        Raises:
            ParamError: if transformers is too old, or the model has layers other than full and sliding attention.
        """
        with errors_as(
            ParamError,
            "Context parallelism of models of Hugging Face needs transformers 4.53 or later",
            of=ImportError,
        ):
            from transformers import AttentionInterface, AttentionMaskInterface
        config = module.config.get_text_config()
        others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if others:
            raise ParamError(
                f"{type(module).__name__} has layers of the type {min(others)!r}, which cannot work on sequences that "
                "ranks share. Use no context parallelism for it."
            )
        AttentionInterface.register(name, self.attend)
        AttentionMaskInterface.register(name, self.mask)
        module.set_attn_implementation(name)
        module.register_forward_pre_hook(self._place_positions, with_kwargs=True)

    def _place_positions(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count the positions of each packed text from 0, as they are without context parallelism."""
        documents, positions = kwargs.get("documents"), kwargs.get("position_ids")
        self._has_documents = documents is not None
        if self._group is None or self._verification is None:
            return None
        if documents is None:
            if positions is not None:
                in_part = functools.partial(sequence.positions, group=self._group, device=positions.device)
                self._verification.check_positions(module, positions, in_part)
            return None
        if self._attention.is_whole:
            return args, {**kwargs, "position_ids": positions_in(documents)}
        positions_of_all = positions_in(sequence.unshard(documents, 1, self._group))
        return args, {**kwargs, "position_ids": sequence.part_of(positions_of_all, 1, self._group)}

    def attend(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        documents: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Compute the attention of a layer; ``attention_mask`` is the width of a window, as :meth:`mask` returns it."""
        changes = [name for name in self._changes if others.get(name) is not None]
        if changes:
            raise ParamError(
                f"{type(layer).__name__} computes its attention with {changes[0]}, which attention over shared "
                "sequences does not know. Use no context parallelism for it."
            )
        if self._has_documents and documents is None:
            raise ParamError(
                f"{type(layer).__name__} is not given the documents that its model got, so that packed texts would "
                "attend to each other. Use no context parallelism for it, or sequences of one text each."
            )
        if attention_mask is not None and attention_mask.ndim == 0:
            sliding_window, attention_mask = int(attention_mask), None
        _refuse(attention_mask, dropout)
        is_causal = getattr(layer, "is_causal", True) if is_causal is None else is_causal
        output = self._attention(
            query, key, value, is_causal=is_causal, scale=scaling, documents=documents, window=sliding_window
        )
        return output.transpose(1, 2).contiguous(), None

    @staticmethod
    def mask(
        *_: Any, attention_mask: Tensor | None = None, local_size: int | None = None, **__: Any
    ) -> Tensor | None:
        """Return the width of a sliding window in place of a mask, None without a window."""
        _refuse(attention_mask, 0.0)
        return None if local_size is None else torch.tensor(local_size)


def _refuse(mask: object, dropout: float) -> None:
    if mask is not None:
        raise ParamError(
            "Attention over shared sequences takes no mask. Leave attention_mask out: give the ranks sequences without "
            "padding, or pack them and give documents, the number of the text of each position."
        )
    if dropout:
        raise ParamError(
            f"Attention over shared sequences does not support dropout, got dropout {dropout}. Set it to 0."
        )


class _AttentionMode(TorchFunctionMode):
    """A mode in which ``scaled_dot_product_attention`` is computed over shared sequences."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func is F.scaled_dot_product_attention:
            with torch._C.DisableTorchFunction():
                return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        _refuse(attn_mask, dropout_p)
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ParamError(
                f"{query.shape[1]} heads and {key.shape[1]} key heads need enable_gqa=True, as in torch."
            )
        return self._attention(query, key, value, is_causal=is_causal, scale=scale)


_thread = threading.local()
"""Has ``attention`` on a thread that is inside of the mode: the attention of the model that it computes."""


def _call_in_mode(attention: SharedAttention, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module inside of the mode; each module enters it, as a recomputed block is called on its own."""
    before = getattr(_thread, "attention", None)
    if before is attention:
        return forward(*args, **kwargs)
    _thread.attention = attention
    try:
        with _AttentionMode(attention):
            return forward(*args, **kwargs)
    finally:
        _thread.attention = before


def name_of_positions(module: nn.Module) -> str:
    """Name of a module's argument for the numbers of positions.

    Raises:
        ParamError: if the module has no such argument.
    """
    taken = inspect.signature(module.forward).parameters
    for name in NAMES_OF_POSITIONS:
        if name in taken:
            return name
    raise ParamError(
        f"{type(module).__name__}.forward takes neither {' nor '.join(NAMES_OF_POSITIONS)}, so ranks cannot share its "
        "sequences: each would count positions from 0. Give it such an argument, or use no context parallelism."
    )


class WholeSequences(nn.Module):
    """Calls a module of :func:`share_sequences` with whole sequences and returns whole outputs, with gradients.

    This is for losses that do not support shared sequences. All ranks of the group pass the same inputs and compute the
    same loss. Each rank gets the gradients of its own positions, multiplied by the number of ranks. :func:`shard`
    averages them over the ranks; the average is the gradient of the whole sequences.

    Args:
        module: a module that takes ``(batch, positions, ...)``, and position indices as ``positions`` or
            ``position_ids``.
        group: process group of the ranks that share sequences.
        verify: True to check in every step that the ranks have the same rows and the same gradients of outputs, and
            that the outputs equal those of one rank alone; None to check the first step, False for never.

    Raises:
        ParamError: if the module takes no position indices: each rank would count its positions from 0.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, *, verify: bool | None = None) -> None:
        super().__init__()
        self.module, self._group = module, group
        self._positions = name_of_positions(module)
        self.is_pipeline_stage = getattr(module, "is_pipeline_stage", False)
        # Earlier stages of a pipeline get gradients of this rank's positions alone, which the last one has scaled.
        self.is_last_stage = getattr(module, "is_last_stage", True)
        self._scale = dist.get_world_size(group) if self.is_last_stage else 1
        self._positions_dim = getattr(module, "positions_dim", 1)
        attention = getattr(module, "shared_attention", None)  # a module may share sequences by itself
        self._attention = attention if isinstance(attention, SharedAttention) else None
        compute_alone = None if self._attention is None else self.compute_alone
        WholeSequenceVerification(self, group, compute_alone, self._positions_dim, verify)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for whole sequences, joined along ``module.positions_dim``, 1 by default."""
        sequences = [value for value in (*args, *kwargs.values()) if _is_sequence(value)]
        lengths = {tensor.shape[1] for tensor in sequences}
        if len(lengths) != 1:
            raise ParamError(
                f"Context parallelism needs inputs (batch, positions, ...) of one length, got {sorted(lengths)}."
            )
        (length,) = lengths
        parts = [self._part(value) for value in args]
        named = {name: self._part(value) for name, value in kwargs.items()}
        numbers = self._numbers(sequence.positions(length, self._group, sequences[0].device))
        return self._join(self.module(*parts, **{self._positions: numbers, **named}), numbers.shape[-1])

    def compute_alone(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for whole sequences, which this rank computes alone."""
        assert self._attention is not None, "share_sequences() has made it"
        first: Tensor = next(value for value in (*args, *kwargs.values()) if _is_sequence(value))
        numbers = self._numbers(torch.arange(first.shape[1], device=first.device))
        self._attention.is_whole = True
        try:
            return self.module(*args, **{self._positions: numbers, **kwargs})
        finally:
            self._attention.is_whole = False

    def _numbers(self, positions: Tensor) -> Tensor:
        return positions[None] if self._positions == "position_ids" else positions

    def _part(self, value: Any) -> Any:
        return sequence.part_of(value, 1, self._group) if _is_sequence(value) else value

    def _join(self, output: Any, length: int) -> Any:
        if isinstance(output, Tensor):
            dim = self._positions_dim
            if output.ndim <= dim or output.shape[dim] != length:
                raise ParamError(
                    f"{type(self.module).__name__} returned a tensor of shape {tuple(output.shape)} for {length} "
                    f"positions, which are not its dimension {dim}. A value of whole sequences, such as a mean over "
                    "positions, cannot be computed from the parts of ranks. Return a value for each position, or use "
                    "no context parallelism."
                )
            return apply(Paired, output, _whole_sequences, _scaled_part, self._group, dim, self._scale)
        if isinstance(output, dict):  # a Hugging Face ModelOutput is one
            for name, value in output.items():
                output[name] = self._join(value, length)
            return output
        if isinstance(output, tuple | list):
            return type(output)(self._join(part, length) for part in output)
        return output


def _is_sequence(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim > 1


def _whole_sequences(part: Tensor, group: dist.ProcessGroup, dim: int, _: int) -> Tensor:
    """Join ``(batch, positions / ranks, ...)`` to ``(batch, positions, ...)``."""
    return sequence.unshard(part, dim, group)


def _scaled_part(gradient: Tensor, group: dist.ProcessGroup, dim: int, scale: int) -> Tensor:
    """This rank's part of the gradient of whole sequences, times ``scale``."""
    part = sequence.part_of(gradient, dim, group)
    return part if scale == 1 else part * scale
