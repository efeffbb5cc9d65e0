"""A trained model as a folder of a few files. No pickle holds weights.

=======================  ============================================================================
``sparkdl_model.json``   format, versions of sparkdl and torch, the feature columns with shapes and
                         dtypes, the outputs, and size and SHA-256 of the other files
``weights.safetensors``  every tensor of the module, by name
``architecture.pkl``     the module without its tensors (:mod:`sparkdl.model.architecture`)
``prepare.pkl``          the function that prepares features, by cloudpickle, if there is one
``examples.safetensors`` the module's inputs for two rows, if there are some. An export is checked with them. The file
                         may be removed.
=======================  ============================================================================

The folder is local; :mod:`sparkdl.estimators` copies it to other filesystems. Reading it needs torch, NumPy,
safetensors and cloudpickle, but no Spark. Pickles run code: load only models that you trust.

:func:`modules_in_pickle` lists the modules that a pickle imports, on the *driver* and without loading the pickle. A
pickle is a program for a stack machine (https://docs.python.org/3/library/pickletools.html). It fetches classes and
functions by module and name. For a function that is pickled with its code, cloudpickle fetches the modules to which the
function refers by calls of its ``subimport``.

Weights of any size are written and read without a copy in memory: they are written from where they are, and the weights
of a loaded module are mapped from the file, which must not be changed while the module is in use.
"""

from __future__ import annotations

import json
import pickletools
import shutil
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch import Tensor, nn

from sparkdl import __version__
from sparkdl.checks import check_format
from sparkdl.errors import SavedModelError, SerializationError
from sparkdl.foreign_errors import errors_as
from sparkdl.model.architecture import join_module, split_module
from sparkdl.model.signature import ModelSignature
from sparkdl.model.weights_file import HashingFile, map_weights, verify_file, write_weights

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence


_SUBIMPORT = "subimport"
_STRINGS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
_GETS = ("BINGET", "LONG_BINGET", "GET")
_PUTS = ("BINPUT", "LONG_BINPUT", "PUT")


def modules_in_pickle(pickled: bytes) -> set[str]:
    """Return the full names of the modules that are imported to read a pickle, and to call functions in it.

    Modules that such a function imports in its body are not found.
    """
    modules: set[str] = set()
    # Strings, and module and name of classes and functions, on the stack of the pickle machine; None for all else.
    memo: dict[int, str | tuple[str, str] | None] = {}
    pushed: list[str | tuple[str, str] | None] = [None, None]
    for opcode, operand, _ in pickletools.genops(pickled):
        argument: Any = operand
        if opcode.name == "FRAME":  # may begin anywhere, and pushes nothing on the stack
            continue
        if opcode.name == "MEMOIZE":
            memo[len(memo)] = pushed[-1]
            continue
        if opcode.name in _PUTS:
            memo[int(argument)] = pushed[-1]
            continue
        value: str | tuple[str, str] | None = None
        if opcode.name in _STRINGS:
            value = argument
        elif opcode.name in _GETS:
            value = memo.get(int(argument))
        elif opcode.name == "STACK_GLOBAL":
            module, name = pushed[-2:]
            assert isinstance(module, str), "pickle has just pushed it"
            assert isinstance(name, str), "likewise"
            value = module, name
        elif opcode.name == "GLOBAL":
            imported_from, _, imported = argument.partition(" ")
            value = imported_from, imported
        if isinstance(value, tuple):
            modules.add(value[0])
        elif isinstance(value, str) and isinstance(pushed[-1], tuple) and pushed[-1][1] == _SUBIMPORT:
            modules.add(value)
        pushed = [pushed[-1], value]
    return modules


FORMAT = 1
"""Number of the format of the folder. Formats with lower numbers remain readable."""

_MANIFEST = "sparkdl_model.json"
_WEIGHTS = "weights.safetensors"
_ARCHITECTURE = "architecture.pkl"
_PREPARE = "prepare.pkl"
_EXAMPLES = "examples.safetensors"
SAVE_AGAIN = "Save the model again, or copy it again from where it was saved."


@dataclass(frozen=True)
class SavedModel:
    """A module and its signature.

    Attributes:
        module: the module.
        signature: its inputs and outputs.
        examples: inputs of the module by name, as :meth:`ModelInputs.example_batches` makes them; empty for none.
    """

    module: nn.Module
    signature: ModelSignature
    examples: tuple[Mapping[str, Tensor], ...] = field(default=(), compare=False, repr=False)

    def with_signature(self, **changes: Any) -> SavedModel:
        """Return the same module with other outputs or another batch size in its signature."""
        return replace(self, signature=replace(self.signature, **changes))


def save_model(model: SavedModel, folder: str | os.PathLike[str]) -> None:
    """Write a trained model to a new local folder, which appears complete or not at all.

    Raises:
        SerializationError: if the module cannot be pickled.
        SavedModelError: if the folder exists already.
    """
    save_module(model.module, folder, signature=model.signature, examples=model.examples)


def load_model(folder: str | os.PathLike[str]) -> SavedModel:
    """Read a trained model from a local folder; the module is on CPU and in ``eval()`` mode.

    Raises:
        SavedModelError: if files are missing or damaged, were written by a newer version, or hold a module that
            was not trained.
    """
    module, signature = load_module(folder)
    if signature is None:
        raise SavedModelError(f"{folder} holds a module that was not trained: it does not say what it takes.")
    return SavedModel(module.eval(), signature, _read_examples(Path(folder, _EXAMPLES)))


def save_module(
    module: nn.Module,
    folder: str | os.PathLike[str],
    *,
    signature: ModelSignature | None = None,
    examples: Sequence[Mapping[str, Tensor]] = (),
) -> None:
    """Write a module as :func:`save_model` does; ``signature`` is None for a module that is not trained yet."""
    folder = Path(folder)
    if folder.exists():
        raise SavedModelError(f"{folder} exists already. Remove it, or save under another name.")
    structure, tensors = split_module(module)
    contents = {_ARCHITECTURE: structure}
    if signature is not None and signature.inputs.prepare is not None:
        with errors_as(SerializationError, "The function that prepares features cannot be saved"):
            contents[_PREPARE] = cloudpickle.dumps(signature.inputs.prepare)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.parent / f".{folder.name}-{uuid.uuid4().hex[:8]}.tmp"
    aside.mkdir()
    try:
        with (aside / _WEIGHTS).open("wb") as file:
            files = {_WEIGHTS: write_weights(tensors, file)}
        if examples:
            with (aside / _EXAMPLES).open("wb") as file:
                files[_EXAMPLES] = write_weights(
                    {
                        f"{index}/{name}": x
                        for index, batch in enumerate(examples)
                        for name, x in batch.items()
                    },
                    file,
                )
        for name, content in contents.items():
            with (aside / name).open("wb") as file:
                hashing = HashingFile(file)
                hashing.write(content)
            files[name] = hashing.describe()
        manifest = {
            "format": FORMAT,
            "sparkdl_version": __version__,
            "torch_version": str(torch.__version__),
            "signature": None if signature is None else signature.to_json(),
            "files": files,
        }
        (aside / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def load_module(folder: str | os.PathLike[str]) -> tuple[nn.Module, ModelSignature | None]:
    """Read a module as it was written, on CPU, and its signature, which is None if it was not trained."""
    folder = Path(folder)
    signature, files = _read_manifest(folder)
    for name, written in files.items():
        if name != _EXAMPLES or (folder / name).exists():
            _check_file(folder / name, written)
    tensors = map_weights(folder / _WEIGHTS)
    if signature is not None and _PREPARE in files:
        what = f"The function that prepares features cannot be read from {folder / _PREPARE}"
        with errors_as(SavedModelError, what, "Install what it needs."):
            prepare = cloudpickle.loads((folder / _PREPARE).read_bytes())
        signature = replace(signature, inputs=replace(signature.inputs, prepare=prepare))
    return join_module((folder / _ARCHITECTURE).read_bytes(), tensors), signature


def _read_examples(path: Path) -> tuple[dict[str, Tensor], ...]:
    if not path.exists():
        return ()
    batches: dict[int, dict[str, Tensor]] = {}
    for key, tensor in map_weights(path).items():
        index, _, name = key.partition("/")
        batches.setdefault(int(index), {})[name] = tensor.clone()  # the file may be removed
    return tuple(batches[index] for index in sorted(batches))


def modules_needed(folder: str | os.PathLike[str]) -> set[str]:
    """Return the full names of the modules that reading and running a saved model needs.

    A function that prepares features may import further modules when it is called.
    """
    folder = Path(folder)
    names = modules_in_pickle((folder / _ARCHITECTURE).read_bytes())
    if (folder / _PREPARE).exists():
        names |= modules_in_pickle((folder / _PREPARE).read_bytes())
    return names


def _read_manifest(folder: Path) -> tuple[ModelSignature | None, dict[str, dict[str, Any]]]:
    path = folder / _MANIFEST
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise SavedModelError(f"{folder} holds no saved model: {_MANIFEST} is missing.") from None
    with errors_as(SavedModelError, f"{path} is damaged", SAVE_AGAIN):
        manifest = json.loads(content)
        check_format(f"{folder}", manifest, FORMAT, SavedModelError)
        listed = manifest["files"]
        files = {name: listed[name] for name in (_WEIGHTS, _ARCHITECTURE)}
        files |= {name: listed[name] for name in (_PREPARE, _EXAMPLES) if name in listed}
        signature = manifest["signature"]
        return None if signature is None else ModelSignature.from_json(signature), files


def _check_file(path: Path, written: dict[str, Any]) -> None:
    if not path.is_file():
        raise SavedModelError(f"{path.parent} is incomplete: {path.name} is missing.")
    with path.open("rb") as file:
        verify_file(
            file,
            written,
            lambda reason: SavedModelError(f"{path} is damaged: {reason} in {_MANIFEST}. {SAVE_AGAIN}"),
        )
