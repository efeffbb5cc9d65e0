"""Replacements for the modules of other stages."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.parallel.pipeline.tied import TiedParameter


class Pass(nn.Module):
    """Replaces a module of another stage: returns its first argument."""

    is_elsewhere = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument."""
        return args[0] if args else next(iter(kwargs.values()))


def make_replacement(shell: nn.Module, name: str, tied: Sequence[TiedParameter]) -> nn.Module:
    """Make the replacement of a module of another stage, which returns its first argument.

    It keeps tied parameters of the module, which have their first name in every stage, as in the whole model.

    Args:
        shell: the stage.
        name: name of the module.
        tied: tied parameters of the stage.
    """
    kept = {tie.name for tie in tied if tie.name == name or tie.name.startswith(f"{name}.")}
    if not kept:
        return Pass()
    replaced: Any = shallow_copy(shell.get_submodule(name))
    for inner_name, inner in list(replaced.named_modules(prefix=name)):
        for last in inner._parameters:
            if f"{inner_name}.{last}" not in kept:
                inner._parameters[last] = None
        inner._buffers.clear()
        for child in list(inner._modules):
            if not any(name.startswith(f"{inner_name}.{child}.") for name in kept):
                del inner._modules[child]
        inner.is_elsewhere = True
    replaced.forward = Pass().forward
    return replaced  # type: ignore[no-any-return]  # a module


def untie(stage: nn.Module, tie: TiedParameter) -> None:
    """Give a stage a copy of a parameter that another stage of the same rank has, too."""
    shared = stage.get_parameter(tie.name)
    copy = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
    vars(copy).update(vars(shared))
    for name in tie.names:
        parent, _, last = name.rpartition(".")
        holder = dict(stage.named_modules()).get(parent)
        if holder is not None and holder._parameters.get(last) is shared:
            holder._parameters[last] = copy


class PassAs(Pass):
    """Replaces a block; returns its first argument in the form of another block's output.

    That is a tensor, or a tuple or list that begins with one.
    """

    def __init__(self, returned: list[Any]) -> None:
        super().__init__()
        self._returned = returned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument in the form of the other block's output."""
        hidden = super().forward(*args, **kwargs)
        (output,) = self._returned
        if isinstance(output, tuple | list):
            return type(output)((hidden, *output[1:]))
        return hidden


class OwnBlocks(nn.ModuleList):
    """Some of a list's blocks under their numbers in the list; iterates over them, and its length is their number."""

    def __getitem__(self, index: Any) -> Any:
        blocks = list(self._modules.values())
        return blocks[index]


def own_blocks(like: nn.Module, blocks: dict[str, nn.Module]) -> OwnBlocks | nn.Sequential:
    """Some of the blocks of a list, or of a Sequential if ``like`` is one, under their numbers there."""
    if isinstance(like, nn.Sequential):
        return nn.Sequential(OrderedDict(blocks))
    kept = OwnBlocks()
    kept._modules.update(blocks)
    return kept


def set_module(shell: nn.Module, name: str, module: nn.Module) -> None:
    """Replace a child of a module, by its name."""
    parent, _, last = name.rpartition(".")
    shell.get_submodule(parent)._modules[last] = module


def shallow_copy(module: nn.Module) -> nn.Module:
    """A copy of a module that shares its parameters and buffers, so that children can be replaced."""
    parameters = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, memo=dict(parameters))
