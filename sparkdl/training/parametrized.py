"""Pickles modules with parametrizations, which torch refuses to. The same on *driver*, *ranks* and *executors*.

``torch.nn.utils.parametrize`` gives such a module a class of its own, made on the spot, with a property in the place of
each parametrized tensor; that class cannot be imported where the pickle is read, so torch has its ``__getstate__``
raise. All else of the module is in its ``__dict__``, the parametrizations and their tensors as modules in it. What
travels is therefore the class that the module had before, the names of the properties, and the ``__dict__``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize


def reduce_parametrized(module: nn.Module) -> tuple[Any, ...]:
    """Return how to make a parametrized module, as ``__reduce__`` does."""
    kind = parametrize.type_before_parametrizations(module)
    names = tuple(name for name, _ in module.get_submodule("parametrizations").named_children())
    # That of the class, where it has one: torch's own stands before it.
    getstate = getattr(kind, "__getstate__", None)
    with torch.no_grad():  # LSTMs keep there what they compute of the parametrized, which shall have no graph
        state = module.__dict__ if getstate is None else getstate(module)
    return make_parametrized, (kind, names), state


def make_parametrized(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """Return a module of a class, with something parametrized under each name until it is given its state."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name in names:
        module.register_buffer(name, torch.empty(0))
        parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)
    return module
