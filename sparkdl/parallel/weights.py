"""Weights of models that no process holds as a whole: drawn, read from files and written to files part by part.

A model is made inside of :func:`~sparkdl.parallel.on_meta`, where its parameters take no memory, then cut, divided and
sharded. After that :func:`draw_weights` or :func:`load_weights` gives each rank the values of its own part.
:func:`save_weights` writes the whole model as a folder of safetensors files with an index, in the format of Hugging
Face.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posixpath
import shutil
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparkdl.checkpoint.tensors import call_on_all_ranks
from sparkdl.data.files.filesystems import open_location
from sparkdl.errors import ParamError, SavedModelError, StoreError
from sparkdl.foreign_errors import store_errors
from sparkdl.model.weights_file import StoredTensor, read_header, read_rows, write_weights
from sparkdl.parallel.replaced_parameters import tie_again
from sparkdl.parallel.sharding import copies_of_tied, list_modules, local_ranges
from sparkdl.torch.buffers import local_part, whole_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sparkdl.data.files.filesystems import Location
    from sparkdl.parallel.parallelism import RankLayout

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_COPIED_BYTES = 4 << 20
"""Size of the pieces in which a file is copied."""


def draw_weights(module: nn.Module | Sequence[nn.Module], *, seed: int, device: str = "cpu") -> None:
    """Draw the initial weights of a model; each rank keeps its part. No communication.

    The weights depend only on the seed and on their names: they are the same in every layout, and in one process. Only
    one layer at a time is in memory as a whole. A model with a method ``draw_weight(name, tensor)`` draws its weights
    with that method; Hugging Face models and layers with ``reset_parameters()``, as those of torch, need none.

    Args:
        module: the model, or this rank's stages of it; parameters on the meta device get memory.
        seed: seed of the random numbers.
        device: device of the parameters that were on the meta device.

    Raises:
        ParamError: if it is not known how a layer draws its weights, or a buffer is on the meta device.
    """
    for root in list_modules(module):
        _make_real(root, device)
    _draw(list_modules(module), seed)


def _draw(
    roots: Sequence[nn.Module], seed: int, chosen: Callable[[nn.Parameter], bool] | None = None
) -> None:
    """Draw all parameters, or those for which ``chosen`` returns True."""
    drawn: set[nn.Parameter] = set()
    for root in roots:
        for layer_name, layer in root.named_modules():
            to_draw = {
                name: parameter
                for name, parameter in layer._parameters.items()
                if parameter is not None and parameter not in drawn and (chosen is None or chosen(parameter))
            }
            if not to_draw:
                continue
            prefix = f"{layer_name}." if layer_name else ""
            values = _draw_layer(root, layer, prefix, to_draw, seed)
            for name, parameter in to_draw.items():
                _fill(parameter, values[name].detach())
            drawn.update(to_draw.values())


def load_weights(
    module: nn.Module | Sequence[nn.Module], folder: str, *, seed: int = 0, device: str = "cpu"
) -> None:
    """Load the weights of a model from a folder of safetensors files; each rank reads its part. No communication.

    A model's method ``stored_name(name)``, if it has one, returns the name of a weight in the files; weights for which
    it returns None are drawn as by :func:`draw_weights`.

    Args:
        module: the model, or this rank's stages of it; parameters on the meta device get memory.
        folder: path or URL of a folder with ``model.safetensors``, or with several files and
            ``model.safetensors.index.json``.
        seed: seed of the weights that are drawn.
        device: device of the parameters that were on the meta device.

    Raises:
        StoreError: if the folder or a file cannot be read.
        SavedModelError: if a weight is missing or has another shape, or the files hold weights that the model does not
            have; nothing is changed then.
        ParamError: if a buffer is on the meta device, or it is not known how a weight is drawn.
    """
    location = open_location(folder)
    stored = _stored_tensors(location, folder)
    names_of = _wanted_names(module, folder, stored)
    for root in list_modules(module):
        _make_real(root, device)
    real: dict[str, list[Tensor]] = defaultdict(list)
    drawn: set[Tensor] = set()
    for root in list_modules(module):
        for names, tensor in _tensors_of(root):
            stored_names = _stored_names(root, names)
            for name in stored_names:
                real[name].append(tensor)
            if not stored_names:
                drawn.add(tensor)
    for file, names in names_of.items():
        with _open(location, file, folder) as opened:
            for name in dict.fromkeys(names):
                for tensor in real[name]:  # several stages of this rank may have it
                    _fill_from(opened, stored[name][1], tensor)
    if drawn:
        _draw(list_modules(module), seed, drawn.__contains__)


def _stored_names(root: nn.Module, names: Sequence[str]) -> list[str]:
    """The names that a tensor may have in files; empty if the tensor is drawn."""
    rename: Any = getattr(root, "stored_name", None)
    renamed = names if rename is None else map(rename, names)
    return [name for name in renamed if name is not None]


def copy_weights(folder: str, target: str) -> None:
    """Copy the files that :func:`load_weights` reads to another folder; as hard links within a local filesystem.

    Raises:
        StoreError: if a file cannot be read or written.
    """
    source, there = open_location(folder), open_location(target)
    names = _files_of(source, folder)
    if names != [SINGLE]:
        names.append(INDEX)
    there.make_folder()
    for name in names:
        path = f"{there.path}/{name}"
        if source.is_local and there.is_local:
            with contextlib.suppress(OSError):  # on another filesystem, or one without links
                os.link(os.path.realpath(f"{source.path}/{name}"), path)
                continue
        with _open(source, name, folder) as opened:
            what = f"The weights cannot be copied to {target}"
            with store_errors(what), there.filesystem.open(path, "wb") as file:
                shutil.copyfileobj(opened, file, _COPIED_BYTES)


def check_weights(module: nn.Module, folder: str) -> None:
    """Check by the headers of the files that :func:`load_weights` can load all weights of a model.

    Args:
        module: the whole model; its parameters may be on the meta device.
        folder: path or URL of a folder, as for :func:`load_weights`.

    Raises:
        StoreError: if the folder or a file cannot be read.
        SavedModelError: if a weight is missing or has another shape, or the files hold weights that the model does not
            have.
        ParamError: if a buffer is on the meta device.
    """
    _check_buffers(module)
    _wanted_names(module, folder, _stored_tensors(open_location(folder), folder))


def _wanted_names(
    module: nn.Module | Sequence[nn.Module], folder: str, stored: Mapping[str, tuple[str, StoredTensor]]
) -> dict[str, list[str]]:
    """The names of the tensors that a model needs, by file."""
    wanted: dict[str, list[str]] = defaultdict(list)
    known: set[str] = set()
    is_whole = True
    for root in list_modules(module):
        is_whole = is_whole and not getattr(root, "is_pipeline_stage", False)
        for names, tensor in _tensors_of(root):
            stored_names = _stored_names(root, names)
            if not stored_names:
                continue
            known.update(stored_names)
            name = next((candidate for candidate in stored_names if candidate in stored), None)
            if name is None:
                raise SavedModelError(
                    f"The weights in {folder} hold no {stored_names[0]!r}. Are they of another model?"
                )
            file, entry = stored[name]
            if tuple(tensor.shape) != entry.shape:
                raise SavedModelError(
                    f"{name!r} is {entry.shape} in {folder}, and {tuple(tensor.shape)} in the model. Make the model "
                    "with the sizes that the weights have."
                )
            wanted[file].append(name)
    others = sorted(stored.keys() - known)
    if others and is_whole:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise SavedModelError(
            f"The weights in {folder} hold {others[0]!r}{more}, which the model, a "
            f"{type(list_modules(module)[0]).__name__}, does not have."
        )
    return wanted


def save_weights(
    module: nn.Module | Sequence[nn.Module], folder: str, layout: RankLayout, *, file_bytes: int = 1 << 30
) -> dict[str, dict[str, Any]]:
    """Write the whole model as safetensors files with an index. Collective.

    One tensor at a time is gathered; the ranks of a pipeline stage write its files in turn. A rank holds the tensors of
    a file that it writes in memory. The index is written last: without it, the folder holds no model. Its metadata
    contains the size and the SHA-256 of each file.

    Args:
        module: the model, or this rank's stages of it.
        folder: path or URL of a folder on a filesystem that all ranks and later readers share.
        layout: layout of the ranks.
        file_bytes: size in bytes above which a new file is begun.

    Returns:
        Size and SHA-256 of each file with weights, by its name.

    Raises:
        StoreError: if the files cannot be written.
    """
    location, all_ranks = open_location(folder), dist.group.WORLD
    what = f"The weights cannot be written to {folder}"

    def begin() -> None:
        """Remove the index of earlier weights, whose files are going to be overwritten."""
        if dist.get_rank() == 0:
            with store_errors(what):
                location.make_folder()
                if location.filesystem.exists(f"{location.path}/{INDEX}"):
                    location.filesystem.rm(f"{location.path}/{INDEX}")

    call_on_all_ranks(begin, all_ranks)
    writer = _Writer(location, what, layout)
    for root in list_modules(module):
        copies = copies_of_tied(root)  # another stage writes them
        for names, tensor in _tensors_of(root):
            if tensor not in copies:
                writer.add(names[0], tensor, file_bytes)
    parts = call_on_all_ranks(writer.finish, all_ranks)
    files = {name: entry for part in parts for name, entry in part["files"].items()}

    def write_index() -> None:
        if dist.get_rank() == 0:
            metadata = {"total_size": sum(part["bytes"] for part in parts), "files": files}
            weight_map = {name: file for part in parts for name, file in part["weight_map"].items()}
            index = {"metadata": metadata, "weight_map": weight_map}
            with store_errors(what):
                location.filesystem.invalidate_cache()
                for name, entry in files.items():
                    path = f"{location.path}/{name}"
                    num_bytes = location.filesystem.size(path) if location.filesystem.exists(path) else None
                    if num_bytes != entry["bytes"]:
                        raise StoreError(
                            f"{what}: a rank wrote {entry['bytes']} bytes of {name}, and rank 0 finds "
                            f"{'no such file' if num_bytes is None else num_bytes}. Choose a folder that all ranks "
                            "share."
                        )
                location.write_whole(INDEX, json.dumps(index, indent=1, sort_keys=True).encode())

    call_on_all_ranks(write_index, all_ranks)
    return files


class _Writer:
    """Distributes the tensors of this rank's pipeline stages over files, which the ranks of a stage write in turn.

    Args:
        location: the folder.
        what: clause that says what failed, for errors.
        layout: layout of the ranks.
    """

    def __init__(self, location: Location, what: str, layout: RankLayout) -> None:
        self._location, self._what = location, what
        self._stage = layout.rank("pipeline")
        self._number = layout.rank("data", "shard", "context", "tensor")
        self._num_peers = layout.size("data", "shard", "context", "tensor")
        self._names: list[list[str]] = [[]]
        self._kept: dict[str, Tensor] = {}
        self._filled = self._total = 0
        self._files: dict[str, Any] = {}
        """Size and checksum of the files that this rank has written, by file name."""

    def add(self, name: str, tensor: Tensor, file_bytes: int) -> None:
        """Add a tensor that is divided among the ranks of the stage. Collective among these ranks."""
        num_bytes = tensor.numel() * tensor.element_size()
        if self._filled and self._filled + num_bytes > file_bytes:
            self._write_file()
            self._names.append([])
            self._filled = 0
        undivided = whole_tensor(tensor)
        if (len(self._names) - 1) % self._num_peers == self._number:
            self._kept[name] = undivided.detach().to("cpu")
        self._names[-1].append(name)
        self._filled += num_bytes
        self._total += num_bytes

    def finish(self) -> dict[str, Any]:
        """Write the last file, and return this rank's part of the index."""
        self._write_file()
        if self._number != 0:  # all ranks of the stage have the same values; one gives them
            return {"files": self._files, "bytes": 0, "weight_map": {}}
        weight_map = {name: self._file(index) for index, names in enumerate(self._names) for name in names}
        return {"files": self._files, "bytes": self._total, "weight_map": weight_map}

    def _file(self, index: int) -> str:
        return f"model-{self._stage:02}-{index:05}.safetensors"

    def _write_file(self) -> None:
        if not self._kept:
            return
        name = self._file(len(self._names) - 1)
        with store_errors(self._what):
            self._location.make_folder()  # on another host, too, so that rank 0 finds out that it has another folder
            with self._location.filesystem.open(f"{self._location.path}/{name}", "wb") as file:
                self._files[name] = write_weights(self._kept, file)
        self._kept = {}


def _tensors_of(root: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
    """Parameters and persistent buffers in the order of the module, each one once, with all of its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    persistent = set(root.state_dict(keep_vars=True))
    for named in (
        root.named_parameters(remove_duplicate=False),
        root.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in named:
            if name in persistent:
                names.setdefault(id(tensor), []).append(name)
                tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        yield names[key], tensor


def _make_real(root: nn.Module, device: str) -> None:
    """Give parameters on the meta device memory without values; tied parameters stay tied."""
    _check_buffers(root)
    ties = [names for names, tensor in _tensors_of(root) if len(names) > 1 and tensor.is_meta]
    make_real: Any = root._apply
    make_real(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    tie_again(root, ties)


def _check_buffers(root: nn.Module) -> None:
    buffers = [name for name, buffer in root.named_buffers() if buffer.is_meta]
    if buffers:
        raise ParamError(
            f"The buffer {buffers[0]!r} of {type(root).__name__} is on the meta device and has no values. Make the "
            "model inside of sparkdl.parallel.on_meta() in place of torch.device('meta')."
        )


def _draw_layer(
    root: Any, layer: Any, prefix: str, to_draw: dict[str, nn.Parameter], seed: int
) -> dict[str, Tensor]:
    """The whole parameters of a layer with their initial values."""
    undivided: Any = nn.Module.__new__(type(layer))  # FSDP2's __new__ takes the constructor's arguments
    undivided.__dict__.update(layer.__dict__)
    undivided._parameters = {
        name: None if parameter is None else nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
        for name, parameter in layer._parameters.items()
    }
    digest = hashlib.sha256(f"{seed} {prefix}".encode()).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        if hasattr(root, "draw_weight"):
            for name in to_draw:
                root.draw_weight(f"{prefix}{name}", undivided._parameters[name])
        elif hasattr(root, "_init_weights"):  # of a Hugging Face model
            root._init_weights(undivided)
        elif hasattr(layer, "reset_parameters"):
            type(layer).reset_parameters(undivided)
        else:
            _check_drawable(root, layer, prefix)
    return {name: undivided._parameters[name] for name in to_draw}


def check_drawable(module: nn.Module) -> None:
    """Check that it is known how all layers of a model draw their weights.

    Raises:
        ParamError: if it is not known; the message names the first such layer. Or if a buffer is on the meta device.
    """
    _check_buffers(module)
    for name, layer in module.named_modules():
        if any(parameter is not None for parameter in layer._parameters.values()):
            _check_drawable(module, layer, name)


def _check_drawable(root: nn.Module, layer: nn.Module, name: str) -> None:
    if not any(hasattr(root, method) for method in ("draw_weight", "_init_weights")) and not hasattr(
        layer, "reset_parameters"
    ):
        raise ParamError(
            f"It is not known how {name.rstrip('.')!r}, a {type(layer).__name__}, draws its weights. Give it a method "
            f"reset_parameters(), or {type(root).__name__} a method draw_weight(name, tensor)."
        )


def _fill(tensor: Tensor, values: Tensor) -> None:
    for along, (first, end) in enumerate(local_ranges(tensor)):
        values = values.narrow(along, first, end - first)
    local = local_part(tensor)
    with torch.no_grad():
        local.copy_(values)


def _fill_from(file: Any, stored: StoredTensor, tensor: Tensor) -> None:
    ranges = local_ranges(tensor)
    first, end = ranges[0] if ranges else (0, 1)
    rows = read_rows(file, stored, first, end - first)
    for along, (start, stop) in enumerate(ranges[1:], start=1):
        rows = rows.narrow(along, start, stop - start)
    local = local_part(tensor)
    with torch.no_grad():
        local.copy_(rows)


def _stored_tensors(location: Location, folder: str) -> dict[str, tuple[str, StoredTensor]]:
    """The file of each tensor in a folder, and its place in that file, by the tensor's name."""
    entries: dict[str, tuple[str, StoredTensor]] = {}
    for name in _files_of(location, folder):
        with _open(location, name, folder) as opened:
            entries |= {tensor: (name, entry) for tensor, entry in read_header(opened).items()}
    return entries


def _files_of(location: Location, folder: str) -> list[str]:
    """The names of the files in a folder that hold weights."""
    try:
        if not location.filesystem.exists(f"{location.path}/{INDEX}"):
            return [SINGLE]
        with location.filesystem.open(f"{location.path}/{INDEX}", "rb") as file:
            names: list[str] = sorted(set(json.loads(file.read())["weight_map"].values()))
        has_single = SINGLE not in names and location.filesystem.exists(f"{location.path}/{SINGLE}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"The index of the weights in {folder} cannot be read: {error}") from error
    for name in names:  # the folder may come from an untrusted source
        if not isinstance(name, str) or name != posixpath.basename(name) or name in ("", ".", ".."):
            raise StoreError(
                f"The index of the weights in {folder} names {name!r}, which is not a file of that folder."
            )
    if has_single:
        raise StoreError(
            f"The folder {folder} holds {SINGLE}, and also {INDEX}, which names other files. Remove the weights that "
            "are not those of the model."
        )
    return names


@contextlib.contextmanager
def _open(location: Location, name: str, folder: str) -> Iterator[Any]:
    needed = f"The folder needs {SINGLE}, or several files and {INDEX}."
    with store_errors(f"{name} in {folder} cannot be read", needed):
        file = location.filesystem.open(f"{location.path}/{name}", "rb")
    with file:
        yield file
