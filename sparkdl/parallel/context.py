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
from torch.utils._pytree import tree_leaves, tree_map

from sparkdl.errors import ParamError
from sparkdl.model.inputs import positions_in
from sparkdl.parallel import sequence
from sparkdl.parallel.attention import all_to_all_attention, ring_attention, whole_attention
from sparkdl.parallel.collectives import apply
from sparkdl.parallel.parallelism import ATTENTION_METHODS
from sparkdl.parallel.tensor.checks import MOST_ROUNDING, MOST_ROUNDING_OF_16_BITS
from sparkdl.parallel.verify import GRADIENTS, SameRows, differing, sketch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_ATTENTION = dict(zip(ATTENTION_METHODS, (ring_attention, all_to_all_attention), strict=True))

_NAMES_OF_POSITIONS = ("positions", "position_ids")


def share_sequences(module: nn.Module, group: dist.ProcessGroup, *, method: str = "ring") -> nn.Module:
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

    Returns:
        ``module``.

    Raises:
        ParamError: if there is no such method, or the model has layers of a type that is not supported. In the first
            step, if the model does not get the numbers of its positions, or computes attention in another way.
    """
    if method not in ATTENTION_METHODS:
        raise ParamError(
            f"The method of context parallelism must be {' or '.join(map(repr, ATTENTION_METHODS))}, got {method!r}."
        )
    calls = _Calls(module, functools.partial(_ATTENTION[method], group=group))
    with_attend: list[Any] = [layer for layer in module.modules() if callable(getattr(layer, "attend", None))]
    of_hugging_face = next(
        (each for each in module.modules() if hasattr(each, "set_attn_implementation")), None
    )
    if with_attend:
        for layer in with_attend:
            layer.attend = _causal(calls.attention)
    elif of_hugging_face is not None:
        _HuggingFaceAttention(calls, group).attach(of_hugging_face, f"sparkdl-{method}-{group.group_name}")
    else:
        replaced = _Replaced(calls.attention)
        for layer in module.modules():
            # A hook would not run when a block is recomputed.
            layer.forward = functools.update_wrapper(
                functools.partial(replaced.call, layer.forward), layer.forward
            )
    calls.watch()
    cast("Any", module).shared_calls = calls
    return module


class _Calls:
    """Checks that a model gets the numbers of its positions, and that its attention is computed over shared sequences.

    Without these checks, each rank could count positions from 0, or attend only to its own part of sequences, silently.

    Attributes:
        are_whole: whether attention is computed over whole sequences on this rank alone at the moment.
    """

    def __init__(self, module: nn.Module, attention: Callable[..., Tensor]) -> None:
        self._module, self._compute = module, attention
        self._signature = inspect.signature(module.forward)
        self._positions = next(
            (name for name in _NAMES_OF_POSITIONS if name in self._signature.parameters), None
        )
        self._are_any = False
        self.are_whole = False

    def __reduce__(self) -> Any:
        return _Unchecked, ()

    def attention(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute attention over shared sequences."""
        self._are_any = True
        return (whole_attention if self.are_whole else self._compute)(*args, **kwargs)

    def watch(self) -> None:
        """Check every call of the module."""
        if self._positions is not None:
            self._module.register_forward_pre_hook(self._check_positions, with_kwargs=True)
        self._module.register_forward_hook(self._check_any)

    def _check_positions(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._positions is not None
        if self._signature.bind_partial(*args, **kwargs).arguments.get(self._positions) is None:
            raise ParamError(
                f"{type(self._module).__name__} shares sequences among ranks and got no {self._positions}, so that it "
                "would count positions from 0 on each rank. Give it sparkdl.parallel.sequence.positions(length, group)."
            )

    def _check_any(self, *_: Any) -> None:
        # A stage of a pipeline may have no layer with attention.
        if not self._are_any and not getattr(self._module, "is_pipeline_stage", False):
            raise ParamError(
                f"{type(self._module).__name__} computes no attention that can be shared: none of its layers called "
                "torch.nn.functional.scaled_dot_product_attention, or what Hugging Face's models call in its place. "
                "Each rank would attend to its own part of a sequence alone. Use no context parallelism for it."
            )


def _causal(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        return attention(query, key, value, is_causal=True, documents=documents)

    return attend


class _Unchecked:
    """Replaces the hooks in a copy of a model: they belong to a process group, which is not copied."""

    def _check_positions(self, *_: Any) -> None: ...
    def _check_any(self, *_: Any) -> None: ...
    def _before(self, *_: Any) -> None: ...


class _HuggingFaceAttention:
    """An attention implementation in the registry of Hugging Face's transformers, over shared sequences."""

    _changes = ("softcap", "s_aux", "sinks", "position_bias", "head_mask", "indices", "block_indices")
    """Arguments of an implementation that change what it computes, and that are not supported here."""

    def __init__(self, calls: _Calls, group: dist.ProcessGroup) -> None:
        self._calls, self._attention, self._group = calls, calls.attention, group
        self._has_documents = False

    def __reduce__(self) -> Any:
        return _Unchecked, ()

    def attach(self, module: Any, name: str) -> None:
        """Make a model call this implementation.

        Raises:
            ParamError: if transformers is too old, or the model has layers other than full and sliding attention.
        """
        try:
            from transformers import AttentionInterface, AttentionMaskInterface
        except ImportError as error:
            raise ParamError(
                f"Context parallelism of models of Hugging Face needs transformers 4.53 or later: {error}"
            ) from error
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
        module.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        documents, given = kwargs.get("documents"), kwargs.get("position_ids")
        self._has_documents = documents is not None
        if self._calls.are_whole:
            return None if documents is None else (args, {**kwargs, "position_ids": positions_in(documents)})
        if documents is not None:
            # The positions of each text are counted from 0, as they are without context parallelism.
            whole = positions_in(sequence.unshard(documents, 1, self._group))
            return args, {**kwargs, "position_ids": sequence.part_of(whole, 1, self._group)}
        if given is None:
            return None
        length = given.shape[-1] * dist.get_world_size(self._group)
        wanted = sequence.positions(length, self._group, given.device)
        if not torch.equal(given, wanted.expand_as(given)):
            raise ParamError(
                f"{type(module).__name__} got position_ids that are not those of this rank's part of the sequence, "
                "which Hugging Face's models take for packed texts. Pack texts by documents=, the number of the text "
                "of each position, and give sparkdl.parallel.sequence.positions(length, group) as position_ids."
            )
        return None

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
        raise ParamError(f"Attention over shared sequences has no dropout, got {dropout}. Set it to 0.")


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


class _Replaced:
    """Calls modules inside of the mode; each module enters it, as a recomputed block is called on its own."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        self._attention = attention
        self._thread = threading.local()

    def call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a module's ``forward``."""
        if getattr(self._thread, "is_inside", False):
            return forward(*args, **kwargs)
        self._thread.is_inside = True
        try:
            with _AttentionMode(self._attention):
                return forward(*args, **kwargs)
        finally:
            self._thread.is_inside = False


def name_of_positions(module: nn.Module) -> str:
    """Name of the argument by which a module takes the numbers of positions.

    Raises:
        ParamError: if the module has no such argument.
    """
    taken = inspect.signature(module.forward).parameters
    for name in _NAMES_OF_POSITIONS:
        if name in taken:
            return name
    raise ParamError(
        f"{type(module).__name__}.forward takes neither {' nor '.join(_NAMES_OF_POSITIONS)}, so ranks cannot share its "
        "sequences: each would count positions from 0. Give it such an argument, or use no context parallelism."
    )


class WholeSequences(nn.Module):
    """Calls a module of :func:`share_sequences` with whole sequences and returns whole outputs, with gradients.

    For losses that do not support shared sequences. All ranks of the group pass the same inputs and compute the same
    loss of the outputs. Each rank then has the gradients of its own positions, times the number of ranks: their average
    over the ranks, which :func:`shard` computes, is the gradient of the whole sequences.

    Args:
        module: a module that takes ``(batch, positions, ...)``, and the numbers of positions as ``positions`` or
            ``position_ids``.
        group: process group of the ranks that share sequences.

    Raises:
        ParamError: if the module does not take the numbers of positions: it would count them from 0 on each rank.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.module, self._group = module, group
        self._positions = name_of_positions(module)
        # The trial of a pipeline's stages is with uninitialized memory.
        self._is_compared = getattr(module, "is_pipeline_stage", False)
        self.is_pipeline_stage = self.is_deferred = self._is_compared
        self.deferred_checks = (self,)
        SameRows(self, group, "context")
        # Earlier stages get gradients of this rank's positions alone, which the last one has scaled.
        is_last = getattr(module, "is_last_stage", True)
        self._scale = dist.get_world_size(group) if is_last else 1
        self._are_gradients_checked = not is_last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for whole sequences, joined along ``module.positions_dim``, 1 by default."""
        lengths = {each.shape[1] for each in (*args, *kwargs.values()) if _is_sequence(each)}
        if len(lengths) != 1:
            raise ParamError(
                f"Context parallelism needs inputs (batch, positions, ...) of one length, got {sorted(lengths)}."
            )
        (length,) = lengths
        if not self._is_compared and torch.is_grad_enabled():
            self._is_compared = True
            self._compare(length, args, kwargs)
        return self._shared(length, args, kwargs)

    def _shared(self, length: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the module with this rank's parts, and join its outputs."""
        parts = [self._part(each) for each in args]
        named = {name: self._part(each) for name, each in kwargs.items()}
        numbers = self._numbers(sequence.positions(length, self._group, _device_of(args, kwargs)))
        return self._joined(self.module(*parts, **{self._positions: numbers, **named}), numbers.shape[-1])

    def _numbers(self, positions: Tensor) -> Tensor:
        return positions[None] if self._positions == "position_ids" else positions

    def _compare(self, length: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compare the outputs for the beginning of a row with those of the whole beginning on each rank.

        Raises:
            ParamError: if they differ at more than a few positions, as rounding may decide between experts: something
                else than the shared attention works on several positions.
        """
        calls = getattr(self.module, "shared_calls", None)
        if not isinstance(calls, _Calls):
            return  # a copy, or a module that shares sequences by itself
        length = min(length, _COMPARED * 2 * dist.get_world_size(self._group))
        args, kwargs = tree_map(
            lambda each: each[:1, :length].clone() if _is_sequence(each) else each, (list(args), dict(kwargs))
        )
        numbers = self._numbers(torch.arange(length, device=_device_of(args, kwargs)))
        modes = {each: each.training for each in self.modules()}
        self.module.eval()  # dropout draws other numbers for a part
        try:
            with torch.no_grad():
                shared = self._shared(length, args, kwargs)
                calls.are_whole = True
                whole = self.module(*args, **{self._positions: numbers, **kwargs})
        finally:
            calls.are_whole = False
            for each, is_training in modes.items():
                each.training = is_training
        pairs = zip(tree_leaves(shared), tree_leaves(whole), strict=True)
        if any(isinstance(one, Tensor) and self._differ(one, other) for one, other in pairs):
            raise ParamError(
                f"{type(self.module).__name__} computes something else on sequences that ranks share than on whole "
                "ones: a layer works on several positions in another way than by attention that can be shared, such as "
                "a convolution, a sum over positions, or attention written by hand. Use no context parallelism for it."
            )

    def _differ(self, shared: Tensor, whole: Tensor) -> bool:
        if not whole.is_floating_point() or not whole.numel():
            return False
        dim = getattr(self.module, "positions_dim", 1)
        difference = (shared - whole).abs().transpose(0, dim).flatten(1).amax(1)
        is_wide = whole.dtype in (torch.float32, torch.float64)
        rounding, share = (MOST_ROUNDING, 0.05) if is_wide else (MOST_ROUNDING_OF_16_BITS, 0.25)
        return bool((difference > rounding * whole.abs().max()).double().mean() > share)

    def _check_gradient(self, gradient: Tensor) -> None:
        """Compare the first gradient of whole sequences, which depends on what each rank compares the outputs with."""
        if self.is_deferred or self._are_gradients_checked:
            return
        self._are_gradients_checked = True
        if any(differing([sketch(gradient, GRADIENTS)], self._group)):
            raise ParamError(
                "The context-parallel ranks of a group computed different gradients of the same outputs. Give them the "
                "same labels and weights of rows, and compute the loss without random numbers."
            )

    def _part(self, value: Any) -> Any:
        return sequence.part_of(value, 1, self._group) if _is_sequence(value) else value

    def _joined(self, output: Any, length: int) -> Any:
        if isinstance(output, Tensor):
            dim = getattr(self.module, "positions_dim", 1)
            if output.ndim <= dim or output.shape[dim] != length:
                raise ParamError(
                    f"{type(self.module).__name__} returned a tensor of shape {tuple(output.shape)} for a part of "
                    f"{length} positions, which is not in dimension {dim}: a value of whole sequences, such as a mean "
                    "over positions, cannot be computed from the parts of ranks. Return one of each position, or use "
                    "no context parallelism."
                )
            return apply(_Joined, output, dim, self._group, self._scale, self._check_gradient)
        if isinstance(output, dict):  # a Hugging Face ModelOutput is one
            for name, each in output.items():
                output[name] = self._joined(each, length)
            return output
        if isinstance(output, tuple | list):
            return type(output)(self._joined(each, length) for each in output)
        return output


_COMPARED = 8
"""Positions per chunk of the comparison: each rank has two chunks."""


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    found: Tensor = next(each for each in (*args, *kwargs.values()) if _is_sequence(each))
    return found.device


def _is_sequence(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim > 1


class _Joined(torch.autograd.Function):
    """Joins the parts of all ranks to whole sequences; the gradient is cut back to this rank's part, and scaled."""

    @staticmethod
    def forward(
        ctx: Any,
        part: Tensor,
        dim: int,
        group: dist.ProcessGroup,
        scale: int,
        check: Callable[[Tensor], None],
    ) -> Tensor:
        """Join ``(batch, positions / ranks, ...)`` to ``(batch, positions, ...)``."""
        ctx.dim, ctx.group, ctx.scale, ctx.check = dim, group, scale, check
        return sequence.unshard(part, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return this rank's part of the gradient, times ``scale``."""
        ctx.check(gradient)
        part = sequence.part_of(gradient, ctx.dim, ctx.group)
        return part if ctx.scale == 1 else part * ctx.scale, None, None, None, None
