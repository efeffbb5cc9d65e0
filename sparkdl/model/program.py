"""A network in one file that holds its code and its weights: TorchScript, or a program of ``torch.export``.

Such a network cannot be divided into structure and weights. It travels and is stored as the bytes of its file, in a
tensor of uint8 beside which nothing is pickled. It predicts, and is not trained.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from sparkdl.errors import ParamError
from sparkdl.foreign_errors import errors_as

if TYPE_CHECKING:
    from torch.export import ExportedProgram


class NetworkProgram(nn.Module):
    """Calls a network that was read from its file.

    Args:
        content: bytes of the file, uint8.
        is_script: whether the file is TorchScript; otherwise it is a program of ``torch.export``.

    Attributes:
        max_rows: largest number of rows for which a program was exported; None for any.
    """

    def __init__(self, content: Tensor, is_script: bool) -> None:
        super().__init__()
        self.content, self.is_script = content, is_script
        self.max_rows: int | None = None
        self._call: Any
        self._load(torch.device("cpu"))

    @property
    def number_dtype(self) -> torch.dtype:
        """The dtype of the first floating-point weight; float32 without one."""
        dtypes = (weight.dtype for weight in self._call.parameters() if weight.is_floating_point())
        return next(dtypes, torch.float32)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the network returns."""
        return self._call(*args, **kwargs)

    def train(self, mode: bool = True) -> NetworkProgram:
        """Set the mode of TorchScript; a program of ``torch.export`` has the one in which it was exported."""
        if self.is_script:
            self._call.train(mode)
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NetworkProgram:
        moved = fn(torch.empty(0, dtype=torch.float32))
        if moved.dtype != torch.float32:
            raise TypeError(
                f"A network that was read from a file cannot be converted to {moved.dtype}: it keeps its dtypes."
            )
        if moved.device != self._device:
            self._load(moved.device)
        super()._apply(fn, recurse)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return NetworkProgram, (self.content, self.is_script)

    def _load(self, device: torch.device) -> None:
        self._device = device
        file = io.BytesIO(self.content.numpy().data)
        if self.is_script:
            loaded: Any = torch.jit.load(file, map_location=device).eval()
        else:
            from torch.export.passes import move_to_device_pass

            exported = torch.export.load(file)
            self.max_rows = _max_rows(exported)
            loaded = move_to_device_pass(exported, device).module()
        # Not among the submodules, whose weights would travel beside the bytes that hold them.
        self.__dict__["_call"] = loaded


def read_program(content: bytes, source: str) -> NetworkProgram:
    """Return the network in a file.

    Args:
        content: content of the file.
        source: path of the file, for errors.

    Raises:
        ParamError: if it holds something else, or a program for one number of rows.
    """
    takes = "It takes a file that torch.jit.save or torch.export.save wrote."
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            parts = [name.partition("/")[2] for name in archive.namelist()]
    except zipfile.BadZipFile as error:
        raise ParamError(f"{source} is not the file of a network. {takes}") from error
    is_script = any(part.startswith("code/") for part in parts)
    if not is_script and "data.pkl" in parts:
        raise ParamError(
            f"{source} holds what torch.save wrote: weights, or a pickle of a whole module. For weights, make the "
            "module, call module.load_state_dict(torch.load(path)), and give the module. For a whole module, give "
            "torch.load(path, weights_only=False), which runs code in the file: load only what you trust."
        )
    with errors_as(ParamError, f"{source} cannot be read as the file of a network", takes):
        if not is_script:
            _check_takes_any_rows(torch.export.load(io.BytesIO(content)), source)
        return NetworkProgram(torch.from_numpy(np.frombuffer(bytearray(content), np.uint8)), is_script)


def program_of(network: torch.jit.ScriptModule | ExportedProgram) -> NetworkProgram:
    """Return a network of TorchScript or ``torch.export``, from its bytes.

    Raises:
        ParamError: if it takes one number of rows only.
    """
    file = io.BytesIO()
    if isinstance(network, torch.jit.ScriptModule):
        torch.jit.save(network, file)
        return read_program(file.getvalue(), "The TorchScript module")
    torch.export.save(network, file)
    return read_program(file.getvalue(), "The exported program")


def _numbers_of_rows(exported: ExportedProgram) -> Iterator[tuple[str, Any]]:
    """Yield the names of the inputs of a program with their numbers of rows, integers or symbols."""
    inputs = set(exported.graph_signature.user_inputs)
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if node.name in inputs and isinstance(value, Tensor) and value.ndim:
            yield node.name, value.shape[0]


def _max_rows(exported: ExportedProgram) -> int | None:
    """Return the largest number of rows that a program takes, as ``Dim("rows", max=64)`` sets it; None for any."""
    symbols = [rows.node.expr for _, rows in _numbers_of_rows(exported) if not isinstance(rows, int)]
    ranges = exported.range_constraints
    most = [str(ranges[symbol].upper) for symbol in symbols if symbol in ranges]
    return min((int(number) for number in most if number.isdigit()), default=None)  # else infinity


def _check_takes_any_rows(exported: ExportedProgram, source: str) -> None:
    for name, rows in _numbers_of_rows(exported):
        if isinstance(rows, int):
            raise ParamError(
                f"{source} takes exactly {rows} rows in its input {name!r}, and batches differ in "
                "length. Export it again for any number of rows: torch.export.export(module, (inputs,), "
                "dynamic_shapes=({0: torch.export.Dim.AUTO},)), with two rows or more in inputs."
            )
