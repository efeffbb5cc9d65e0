"""Splits a module, or an object that holds one, into its structure and its tensors, and joins them again.

Modules with parametrizations are pickled here because torch refuses to. ``torch.nn.utils.parametrize`` gives such a
module a class of its own, made at run time, with a property instead of each parametrized tensor; that class
cannot be imported where the pickle is read, so torch has its ``__getstate__`` raise. Everything else of the module is
in its ``__dict__``, with the parametrizations and their tensors as modules in it. The pickle therefore holds the
class that the module had before, the names of the properties, and the ``__dict__``.

The structure is a cloudpickle in which a name replaces every parameter, buffer (persistent or not) and other tensor;
the tensors are sent and stored beside it. The module is neither copied nor changed.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import is_parametrized

from sparkdl.errors import ParamError, SavedModelError, SerializationError
from sparkdl.foreign_errors import errors_as

if TYPE_CHECKING:
    from collections.abc import Mapping


def reduce_parametrized(module: nn.Module) -> tuple[Any, ...]:
    """Return callable, arguments and state that make a parametrized module, as ``__reduce__`` does."""
    kind = parametrize.type_before_parametrizations(module)
    names = tuple(name for name, _ in module.get_submodule("parametrizations").named_children())
    # The __getstate__ of the original class, if it has one: torch's overrides it in the parametrized class.
    getstate = getattr(kind, "__getstate__", None)
    with torch.no_grad():  # LSTMs keep tensors computed from parametrized ones, which must have no graph
        state = module.__dict__ if getstate is None else getstate(module)
    return make_parametrized, (kind, names), state


def make_parametrized(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """Return a module of a class with a placeholder parametrization under each name; the state replaces them."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name in names:
        module.register_buffer(name, torch.empty(0))
        parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)
    return module


def copy_on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the device meta; no tensor of the module is copied on the way."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    with torch.device("meta"):
        return copy.deepcopy(module, memo).to("meta")


def parameter_with_hook(module: nn.Module) -> str | None:
    """The name of a parameter whose gradient has a hook, which only this object has: a pickle or a new part has none.

    Returns:
        The first name; None if there is no such parameter.
    """
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return name
    return None


_TAG = "sparkdl.tensor"


def check_has_values(module: nn.Module, what: str) -> None:
    """Check that no parameter or buffer of a module is on the device meta, where tensors have no values.

    Args:
        module: module to check.
        what: beginning of the error message.

    Raises:
        ParamError: if there is such a tensor; the message names the first one.
    """
    names = [
        name
        for named in (module.named_parameters(), module.named_buffers())
        for name, tensor in named
        if tensor.is_meta
    ]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ParamError(
            f"{what}: {names[0]!r}{more} of the {type(module).__name__} is on the device meta, where tensors have no "
            "values. "
            "Build the module outside of torch.device('meta'), or call module.to_empty(device='cpu') and initialize or "
            "load its weights. An estimator has the ranks do so where Param initialWeights is set."
        )


def split_module(module: nn.Module, *, with_meta: bool = False) -> tuple[bytes, dict[str, Tensor]]:
    """Return a module's structure and its tensors by name.

    Parameters and buffers have their names in the module; a shared tensor appears once. The tensors are the module's
    own, detached, on the devices on which they are.

    Args:
        module: module to split.
        with_meta: whether tensors may be on the device meta.

    Raises:
        SerializationError: if the module is TorchScript, or holds something that cannot be pickled; the message names
            it.
        ParamError: if tensors are on the device meta without ``with_meta``.
    """
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise SerializationError(
                f"The model {type(module).__name__} is TorchScript{f' in its part {name!r}' if name else ''}, which "
                "holds code and weights in one, so that its weights cannot travel or be stored by themselves. Give the "
                "module that torch.jit.script or torch.jit.trace was given; compileModel has ranks compile it."
            )
    if not with_meta:
        check_has_values(module, "The model cannot travel or be stored")
    what = f"The model {type(module).__name__} cannot be pickled"
    with errors_as(
        SerializationError, what, "Keep locks, open files, sessions and the like out of the module."
    ):
        return split_tensors(module, module, with_meta=with_meta)


def split_tensors(
    value: object, module: nn.Module, *, with_meta: bool = False
) -> tuple[bytes, dict[str, Tensor]]:
    """Return the structure of a picklable value, and its tensors by name; tensors of ``module`` have their names in it.

    Objects that are shared inside ``value``, such as a module that a loss refers to, stay shared. Tensors on the device
    meta are part of the structure, or with ``with_meta`` of the tensors.
    """
    file = io.BytesIO()
    pickler = _StructurePickler(file, _names_by_identity(module), with_meta=with_meta)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


def join_tensors(structure: bytes, tensors: Mapping[str, Tensor]) -> Any:
    """Join the results of :func:`split_tensors`, without a copy; unpickling runs code."""
    return _StructureUnpickler(io.BytesIO(structure), tensors).load()


def join_module(structure: bytes, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Join the results of :func:`split_module` to a module.

    The module uses the given tensors without a copy. Unpickling runs code: join only a structure that you trust.

    Raises:
        SavedModelError: if the structure cannot be read, or names a tensor that is missing.
    """
    try:
        module = join_tensors(structure, tensors)
    except SavedModelError:
        raise
    except ModuleNotFoundError as error:
        raise SavedModelError(
            f"The model needs the Python module {error.name!r}, which is not installed here. Install what "
            "the model was written with, or define its class in the module that is run."
        ) from error
    except Exception as error:
        raise SavedModelError(
            f"The model's structure cannot be read with torch {torch.__version__}: {type(error).__name__}: "
            f"{error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise SavedModelError(
            f"The model's structure holds a {type(module).__name__} instead of a torch.nn.Module."
        )
    return module


def _names_by_identity(module: nn.Module) -> dict[int, str]:
    names: dict[int, str] = {}
    for named in (module.named_parameters(), module.named_buffers()):
        for name, tensor in named:
            names.setdefault(id(tensor), name)
    return names


def _is_plain(value: object) -> bool:
    """Whether safetensors can hold a value; other tensors (sparse, quantized, lazy, complex) stay in the pickle."""
    return (
        isinstance(value, Tensor)
        and type(value) in (Tensor, nn.Parameter, nn.Buffer)
        and not is_lazy(value)
        and value.layout == torch.strided
        and not value.is_quantized
        and not value.is_complex()
    )


class _StructurePickler(cloudpickle.Pickler):
    """Writes a name in place of each tensor."""

    def __init__(self, file: io.BytesIO, names: dict[int, str], *, with_meta: bool) -> None:
        super().__init__(file, protocol=pickle.DEFAULT_PROTOCOL)
        self._names, self._with_meta = names, with_meta
        self._kept: list[
            Tensor
        ] = []  # the id of an object that is freed while pickling could be that of another object
        self.tensors: dict[str, Tensor] = {}

    def persistent_id(self, obj: Any) -> tuple[str, str, str, bool, dict[str, Any]] | None:
        if not _is_plain(obj) or (obj.is_meta and not self._with_meta):
            return None
        name = self._names.get(id(obj))
        if name is None:
            name = self._names[id(obj)] = f"tensor:{len(self._kept)}"
            self._kept.append(obj)
        self.tensors[name] = obj.detach()
        return _TAG, name, type(obj).__name__, bool(obj.requires_grad), vars(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and is_parametrized(obj):
            return reduce_parametrized(obj)
        return super().reducer_override(obj)


class _StructureUnpickler(pickle.Unpickler):
    """Puts a tensor in place of each name, the same tensor for equal names."""

    def __init__(self, file: io.BytesIO, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._made: dict[str, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        tag, name, kind, requires_grad, attributes = pid
        if tag != _TAG or name not in self._tensors:
            raise SavedModelError(
                f"The model's structure names the tensor {name!r}, and its weights hold no such tensor."
            )
        if name not in self._made:
            tensor = self._tensors[name]
            if kind == "Parameter":
                self._made[name] = nn.Parameter(tensor, requires_grad=requires_grad)
            else:
                self._made[name] = tensor.requires_grad_(requires_grad)
            vars(self._made[name]).update(attributes)  # optimizer factories may read them to make groups
        return self._made[name]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Context in which a module is in ``eval()`` mode without gradients; afterwards every part has its former mode."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, is_training in modes.items():
            part.training = is_training


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """Return the number of all parameters of a module, and of those that are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
