"""Checks of tensor parallelism: of attention heads before the first step, and of what is computed in it.

Tensors that every rank has whole must be equal on all ranks, and divided layers must compute the same as whole ones. A
plan can be wrong in ways that do not show in shapes; without these checks, each rank would then silently train a
different model.
"""

from __future__ import annotations

import functools
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sparkdl.errors import ParamError, SparkdlError
from sparkdl.parallel.verify import GRADIENTS, differing, sketch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class EqualityCheck:
    """Check, in the first step, of the tensors that every rank has whole: they must be equal on all ranks.

    They are the inputs of divided layers, and the gradients of parameters of layers that the plan does not name.
    Without the check, ranks would silently train different models if their rows or random numbers differ, or if a layer
    between divided ones is left out of the plan.

    Attributes:
        is_deferred: whether nothing is checked yet; see :func:`defer_checks`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.is_deferred = False
        self._group = group
        self._sums: dict[str, Tensor] = {}
        self._inputs_of: set[str] = set()
        self._watched: set[str] = set()
        self._compared: set[str] = set()

    def check_input(self, layer: str, tensor: Tensor) -> None:
        """Compare a layer's input between the ranks, at its first call.

        Raises:
            ParamError: if the ranks have different inputs.
        """
        if self.is_deferred or layer in self._inputs_of:
            return
        self._inputs_of.add(layer)
        if any(differing([sketch(tensor)], self._group)):
            raise ParamError(
                f"The tensor-parallel ranks gave different inputs to the divided layer {layer!r}. Give the ranks of a "
                "tensor group the same rows, and the same random numbers for dropout."
            )

    def watch_gradients(self, layer: str, parameters: Mapping[str, Tensor | None]) -> None:
        """Compare the gradients of a layer's parameters at the end of the first backward pass that computes them.

        A pipeline schedule may compute the gradients of different parameters in different passes.
        """
        if self.is_deferred or (self._compared and self._watched <= self._compared):
            return
        for name, parameter in parameters.items():
            if parameter is not None and parameter.requires_grad and not parameter.is_leaf:
                full_name = f"{layer}.{name}" if layer else name
                if full_name in self._compared:
                    continue
                self._watched.add(full_name)
                parameter.register_hook(  # type: ignore[no-untyped-call]  # of torch
                    functools.partial(self._note, full_name)
                )

    def _note(self, name: str, gradient: Tensor) -> None:
        if name in self._compared:
            return
        if not self._sums:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._compare_gradients)
        sums = sketch(gradient, GRADIENTS)
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def _compare_gradients(self) -> None:
        names = sorted(self._sums)
        self._compared.update(names)
        differs = differing([self._sums.pop(name) for name in names], self._group)
        wrong = [name for name, is_wrong in zip(names, differs, strict=True) if is_wrong]
        if wrong:
            raise ParamError(
                f"Every tensor-parallel rank has {wrong[0]!r} whole, and the ranks computed different gradients of it. "
                "If its layer works on the features or heads of divided layers, name it in the plan as 'replicated'. "
                "Otherwise give the ranks of a tensor group the same random numbers for dropout."
            )


class ComparedOnce:
    """Comparison of a module's output with divided layers and its output with whole layers, at its first call.

    A fused projection of queries, keys and values would be cut across them, and a number of heads that is a constant in
    ``forward`` would divide a rank's features into smaller heads: the shapes fit, and the numbers are wrong.

    With sequence parallelism, whole blocks are compared as well: a layer between divided ones that works on several
    positions, such as attention that the plan leaves out, would see only this rank's positions.

    Of the modules that recur in every block of a model, only one is compared; its weights are gathered for that.

    Attributes:
        is_whole: whether divided layers compute with whole weights at the moment, as without a plan.
        is_joined: whether they also get whole sequences at the moment.
        is_deferred: whether nothing is compared yet; see :func:`defer_checks`.
    """

    def __init__(self) -> None:
        self.is_deferred = False
        self.is_whole = False
        self.is_joined = False
        self._seen: set[str] = set()
        self._handles: dict[str, Any] = {}

    def watch(self, name: str, module: nn.Module) -> None:
        """Compare a module whose layers are all divided and whose output is whole, unless one like it is compared."""
        kind = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if kind in self._seen:
            return
        self._seen.add(kind)
        self._handles[name] = module.register_forward_hook(
            functools.partial(self._compare, name), with_kwargs=True
        )

    def watch_sequences(
        self, name: str, block: nn.Module, join: Callable[[Tensor], Tensor], joined: Any
    ) -> None:
        """Compare a block that takes and returns parts of sequences, unless one like it is compared.

        Args:
            name: name of the block.
            block: the block.
            join: function that joins the parts of all ranks.
            joined: pre-forward hook that joins the parts in the block's arguments.
        """
        if getattr(block, "is_elsewhere", False):
            return  # another pipeline stage has it
        kind = repr(block)
        if kind not in self._seen:
            self._seen.add(kind)
            self._handles[name] = block.register_forward_pre_hook(
                functools.partial(self._compare_sequences, name, join, joined), with_kwargs=True
            )

    def _compare(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.is_whole or self.is_deferred or not isinstance(_first_tensor(output), Tensor):
            return
        self._handles.pop(name).remove()
        if _has_float8(module):
            return
        kwargs = _without_caches(kwargs)
        with self._evaluating(module):
            divided = self._computed(module, args, kwargs)
            self.is_whole = True
            whole = self._computed(module, args, kwargs)
        if not _are_close(divided, whole):
            raise ParamError(
                f"With its layers divided among the tensor-parallel ranks, {name!r} computes something else than with "
                "whole ones. Its forward must work on any number of heads or features, as by view(..., -1, head_size), "
                "and a fused projection, such as one of queries, keys and values, must be made a layer for each of "
                "them."
            )

    def _compare_sequences(
        self,
        name: str,
        join: Callable[[Tensor], Tensor],
        joined: Any,
        module: nn.Module,
        args: Any,
        kwargs: Any,
    ) -> None:
        if self.is_deferred:
            return
        self._handles.pop(name).remove()
        if _has_float8(module):
            return
        kwargs = _without_caches(kwargs)
        failure = divided = None
        with self._evaluating(module), torch.no_grad():
            try:
                divided = join(self._computed(module, args, kwargs))
            except SparkdlError:  # a lost rank, for example
                raise
            except RuntimeError as error:  # shapes that do not fit
                failure = error
            self.is_whole = self.is_joined = True
            args, kwargs = joined(module, args, kwargs)
            whole = self._computed(module, args, kwargs)
        if failure is not None or not _are_close(divided, whole):
            raise ParamError(
                f"With sequences divided among the tensor-parallel ranks, {name!r} computes something else than with "
                "whole ones: a layer in it that is not divided works on several positions, as attention does. Divide "
                "that layer's projections by the plan, or use sequence=False."
            ) from failure

    @contextmanager
    def _evaluating(self, module: nn.Module) -> Iterator[None]:
        modes = {each: each.training for each in module.modules()}
        module.eval()  # dropout draws other numbers for a part
        try:
            yield
        finally:
            self.is_whole = self.is_joined = False
            for each, is_training in modes.items():
                each.training = is_training

    @staticmethod
    def _computed(module: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))  # may be changed in place
        devices = sorted({each.device.index for each in module.parameters() if each.is_cuda})
        with torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(0)
            return _first_tensor(module.forward(*args, **kwargs))


def defer_checks(stage: nn.Module, equality: EqualityCheck, compared: ComparedOnce) -> None:
    """Check nothing until :func:`begin_checks` is called for this stage of a pipeline.

    Torch first calls stages with uninitialized memory, to learn the shapes that they pass on.
    """
    equality.is_deferred = compared.is_deferred = True
    cast("Any", stage).deferred_checks = (equality, compared)


def begin_checks(stage: nn.Module) -> None:
    """Begin the deferred checks of a stage, before its first call with data; later calls do nothing."""
    for module in stage.modules():  # a wrapper may be around the stage
        for check in module.__dict__.pop("deferred_checks", ()):
            check.is_deferred = False


_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")
"""Arguments of Hugging Face layers that a call changes."""

MOST_ROUNDING = 0.01
MOST_ROUNDING_OF_16_BITS = 0.1
"""Largest difference between the outputs of divided and of whole layers, as a share of the largest output; bfloat16
has 8 bits of mantissa."""


def _has_float8(module: nn.Module) -> bool:
    """Whether a module has Float8 layers, which cannot be compared: their scales belong to their parts."""
    return any(type(each).__name__.startswith("Float8") for each in module.modules())


def _without_caches(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: None if key in _CACHES else value for key, value in kwargs.items()}


def _are_close(divided: Any, whole: Any) -> bool:
    if divided.shape != whole.shape:
        return False
    difference, largest = (each.abs().max().item() for each in (divided - whole, whole))
    is_wide = whole.dtype in (torch.float32, torch.float64)
    return not difference > (MOST_ROUNDING if is_wide else MOST_ROUNDING_OF_16_BITS) * largest


def _first_tensor(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) and output else output


def check_heads(module: nn.Module, divided: Mapping[str, tuple[nn.Module, str]], size: int) -> None:
    """Check that each rank gets whole attention heads, if the model says how many it has."""
    for prefix, config in _head_counts(module):
        name = next(
            (name for name, (_, style) in divided.items() if style == "colwise" and name.startswith(prefix)),
            None,
        )
        if name is None:
            continue
        for attribute, heads in config.items():
            if heads % size:
                raise ParamError(
                    f"The model has {attribute} = {heads}, which {size} tensor-parallel ranks cannot divide ({name!r} "
                    f"would be cut inside a head). {_sizes_that_fit(heads)}"
                )


def _sizes_that_fit(heads: int) -> str:
    if heads == 1:
        return "Use shard or context in place of tensor."
    return f"Use a tensor size that divides {heads}."


def check_heads_shared(module: nn.Module, method: str, size: int) -> None:
    """Check that context-parallel ranks can divide a model's attention heads, if it says how many it has.

    Raises:
        ParamError: if they cannot, and the method needs it.
    """
    for _, counts in _head_counts(module):
        heads = next(iter(counts.values()))
        if method == "all-to-all" and heads % size:
            raise ParamError(
                f"All-to-all attention divides {heads} heads among {size} ranks, which leaves a remainder. Use a "
                "context size that divides the number of heads, or attention='ring'."
            )


def _head_counts(module: nn.Module) -> Iterator[tuple[str, dict[str, int]]]:
    """Name prefixes of the modules that say how many attention heads they have, and the counts by attribute.

    Hugging Face models have a ``config``, decoders of sparkdl ``sizes``.
    """
    for name, each in module.named_modules():
        for holder, attributes in (
            ("config", ("num_attention_heads", "num_key_value_heads")),
            ("sizes", ("heads", "key_heads")),
        ):
            found = {
                attribute: getattr(getattr(each, holder, None), attribute, None) for attribute in attributes
            }
            counts = {attribute: heads for attribute, heads in found.items() if isinstance(heads, int)}
            if counts:
                yield f"{name}." if name else "", counts
