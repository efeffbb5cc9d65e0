"""The checks of models whose layers are divided among tensor-parallel ranks."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sparkdl.errors import ParamError, SparkdlError
from sparkdl.model.architecture import evaluating
from sparkdl.parallel.verify.sketches import (
    GRADIENTS,
    MOST_ROUNDING,
    MOST_ROUNDING_OF_16_BITS,
    differing,
    sketch,
)
from sparkdl.parallel.verify.verification import Verification, paused
from sparkdl.patches.compiler import not_compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sparkdl.parallel.tensor.layers import Division


class TensorVerification(Verification):
    """Checks of a model that is divided among tensor-parallel ranks.

    Tensors that every rank has whole must be equal on all ranks: the rows, the inputs of divided layers, and the
    gradients of parameters that the plan does not divide. Divided layers must compute the same as whole ones: a fused
    projection of queries, keys and values would be cut across them, and a number of heads that is a constant in
    ``forward`` would divide a rank's features into smaller heads. With sequence parallelism, a layer between divided
    ones that works on several positions would see only this rank's positions.

    Args:
        module: the divided module.
        division: its division.
        verify: see :class:`Verification`.
    """

    def __init__(self, module: nn.Module, division: Division, verify: bool | None) -> None:
        super().__init__(module, division.group, verify, dimension="tensor")
        self._divided, self._division, self._is_off = module, division, verify is False
        self._whole_parameters: set[str] = set()
        self._kinds: set[str] = set()

    def watch_input(self, name: str, layer: nn.Module) -> None:
        """Compare the first input of a divided layer, which all ranks have whole."""
        if not self._is_off:
            layer.register_forward_pre_hook(functools.partial(self._check_input, name), with_kwargs=True)

    def watch_gradients(self, name: str, parameters: Iterable[str]) -> None:
        """Compare the gradients of parameters of a layer that all ranks have whole."""
        self._whole_parameters.update(f"{name}.{parameter}".lstrip(".") for parameter in parameters)

    def watch_output(
        self,
        name: str,
        module: nn.Module,
        *,
        inputs: Callable[..., Any] | None = None,
        output: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Compare the output that a module computes with divided layers and the one that it computes with whole layers.

        Of the modules that recur in every block of a model, only the first is compared; its weights are gathered.

        Args:
            name: name of the module.
            module: the module.
            inputs: pre-forward hook that joins the parts of sequences that the module takes; None if it takes whole
                sequences.
            output: function that joins the parts of sequences that it returns; None if it returns whole ones.
        """
        kind = re.sub(r"\.\d+(?=\.|$)", ".*", name) if inputs is None else repr(module)
        is_here = not getattr(module, "is_elsewhere", False)  # another pipeline stage has it
        if not self._is_off and is_here and kind not in self._kinds:
            self._kinds.add(kind)
            module.register_forward_pre_hook(
                functools.partial(self._check_with_whole, name, inputs, output), with_kwargs=True
            )

    def _check_input(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.begins(f"input of {name}"):
            self._compare_input(name, args[0] if args else next(iter(kwargs.values())))

    @not_compiled
    def _compare_input(self, name: str, tensor: Tensor) -> None:
        if any(differing([sketch(tensor)], self._group)):
            raise ParamError(
                f"The tensor-parallel ranks gave different inputs to the divided layer {name!r}. Give the ranks of a "
                "tensor group the same rows, and the same random numbers for dropout."
            )

    def _compare_step(self, with_gradients: bool) -> None:
        if not with_gradients:
            return
        gradients = {
            name: parameter.grad
            for name, parameter in self._divided.named_parameters()
            if name in self._whole_parameters and parameter.requires_grad
        }
        sketches = [
            None if gradient is None else sketch(gradient, GRADIENTS) for gradient in gradients.values()
        ]
        differs = differing(sketches, self._group)
        if any(differs):
            raise ParamError(
                f"Every tensor-parallel rank has {[*gradients][differs.index(True)]!r} whole, and the ranks computed "
                "different gradients of it. If its layer works on the features or heads of divided layers, name it in "
                "the plan as 'replicated'. Otherwise give the ranks of a tensor group the same random numbers for "
                "dropout."
            )

    def _check_with_whole(self, name: str, *call: Any) -> None:
        if self.begins(f"output of {name}"):
            self._compare_with_whole(name, *call)

    @not_compiled
    def _compare_with_whole(
        self,
        name: str,
        inputs: Callable[..., Any] | None,
        output: Callable[[Tensor], Tensor] | None,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if any(type(layer).__name__.startswith("Float8") for layer in module.modules()):
            return  # the scales of such layers belong to their parts
        kwargs = {key: None if key in _CACHES else value for key, value in kwargs.items()}
        failure = divided = None
        # Paused: what is checked in these trials would not be checked in the pass that follows, with dropout.
        with evaluating(module), paused([self]):
            try:
                divided = _first_output(module, args, kwargs)
                divided = output(divided) if output is not None else divided
            except (SparkdlError, torch.OutOfMemoryError):  # a lost rank, for example
                raise
            except RuntimeError as error:  # shapes that do not fit
                failure = error
            self._division.is_whole = True
            try:
                args, kwargs = inputs(module, args, kwargs) if inputs is not None else (args, kwargs)
                undivided = _first_output(module, args, kwargs)
            finally:
                self._division.is_whole = False
        if not isinstance(undivided, Tensor) or (failure is None and _are_close(divided, undivided)):
            return
        if inputs is not None:
            raise ParamError(
                f"When sequences are divided among the tensor-parallel ranks, {name!r} computes another result: a "
                "layer in it that is not divided works on several positions, as attention does. Divide that layer's "
                "projections by the plan, or use sequence=False."
            ) from failure
        raise ParamError(
            f"When its layers are divided among the tensor-parallel ranks, {name!r} computes another result. Its "
            "forward must work on any number of heads or features, as by view(..., -1, head_size), and a fused "
            "projection, such as one of queries, keys and values, must be made a layer for each of them."
        ) from failure


_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")
"""Arguments of Hugging Face layers that a call changes."""


def _first_output(module: nn.Module, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))  # may be changed in place
    devices = sorted({parameter.device.index for parameter in module.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        output = module.forward(*args, **kwargs)
    return output[0] if isinstance(output, tuple | list) and output else output


def _are_close(divided: Any, whole: Tensor) -> bool:
    if divided.shape != whole.shape:
        return False
    difference, largest = (tensor.abs().max().item() for tensor in (divided - whole, whole))
    is_wide = whole.dtype in (torch.float32, torch.float64)
    return not difference > (MOST_ROUNDING if is_wide else MOST_ROUNDING_OF_16_BITS) * largest
