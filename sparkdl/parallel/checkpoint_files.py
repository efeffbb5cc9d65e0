"""The files of sharded checkpoints, and their reader and writer for ``torch.distributed.checkpoint``.

A checkpoint is a folder such as ``checkpoint-00000003-step-00000120``: the third checkpoint that was begun, after step
120.

====================================  ===============================================================================
``sparkdl_sharded_checkpoint.json``   the manifest: shapes and parts of all tensors, size and SHA-256 of all files, and
                                      the layout; written last
``rank-00000.safetensors``            the parts of tensors that a rank writes, each as ``name@offsets``
``rank-00000.pt``                     a rank's random state; the file of rank 0 also holds the state that is the same on
                                      all ranks. An archive of torch, loaded with ``weights_only=True``
====================================  ===============================================================================

A folder without a manifest is an unfinished checkpoint: it is never loaded, and the next save removes it. No file
holds code.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
from collections import defaultdict
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.futures import Future

from sparkdl import __version__
from sparkdl.data.files.filesystems import Location, absolute_url, open_location
from sparkdl.data.store.housekeeping import list_folders
from sparkdl.errors import CheckpointError, SparkdlError, StoreError
from sparkdl.meanings import explain_failure, store_error
from sparkdl.model.weights_file import HashingFile, read_header, read_rows, write_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import IO

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MANIFEST = "sparkdl_sharded_checkpoint.json"

_NAME = re.compile(r"checkpoint-(\d+)-step-(\d+)$")
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Report:
    """A rank's report of the files that it has written.

    Attributes:
        step: number of completed steps at the checkpoint.
        reader: index of the rank's share of the rows.
        groups: index of the optimizer's group of each parameter, by its name; None without an optimizer.
        files: size and SHA-256 of each file, by its name.
        parts: name and offsets of each part of a tensor that was written.
    """

    step: int
    reader: int
    groups: dict[str, int] | None
    files: dict[str, dict[str, Any]]
    parts: list[tuple[str, tuple[int, ...]]]


class CheckpointFolder:
    """A folder with the checkpoints of one job. Every rank reads; rank 0 begins, commits and removes checkpoints."""

    def __init__(self, url: str, num_kept: int) -> None:
        self.url = absolute_url(url)
        self._location = open_location(self.url)
        self._num_kept = num_kept

    def location(self, name: str) -> Location:
        """Return the location of a checkpoint's files."""
        return open_location(f"{self.url}/{name}")

    def _all(self) -> list[tuple[int, int, str]]:
        """Number, step and name of each checkpoint, complete or not, the oldest first."""
        filesystem = self._location.filesystem
        with _reading(self.url):
            filesystem.invalidate_cache()
            names = list_folders(self._location) if filesystem.exists(self._location.path) else []
        matches = [match for match in map(_NAME.match, names) if match is not None]
        return sorted((int(match[1]), int(match[2]), match[0]) for match in matches)

    def _has_manifest(self, name: str) -> bool:
        with _reading(self.url):
            return bool(self._location.filesystem.exists(f"{self._location.path}/{name}/{MANIFEST}"))

    def complete(self) -> list[tuple[int, int, str]]:
        """Return number, step and name of each complete checkpoint, the oldest first."""
        return [found for found in self._all() if self._has_manifest(found[2])]

    def find(self, step: int | None) -> tuple[str, dict[str, Any]] | None:
        """Name and manifest of the newest checkpoint, of one step if it is given; None if there is no checkpoint."""
        complete = self.complete()
        names = [name for _, its_step, name in complete if step in (None, its_step)]
        if not names:
            if step is None:
                return None
            steps = ", ".join(str(its_step) for _, its_step, _ in complete) or "no step"
            raise CheckpointError(f"{self.url} has no checkpoint of step {step}; it has those of {steps}.")
        path = f"{names[-1]}/{MANIFEST}"
        with _reading(f"{self.url}/{path}"):
            with self._location.filesystem.open(f"{self._location.path}/{path}", "rb") as file:
                content = file.read()
            try:
                manifest = json.loads(content)
                version = int(manifest["format_version"])
            except (ValueError, KeyError, TypeError) as error:
                raise _damaged(f"{self.url}/{path}", f"{type(error).__name__}: {error}") from error
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"{self.url}/{path} has format {version}, written by sparkdl {manifest.get('sparkdl_version')}; this "
                f"sparkdl ({__version__}) reads up to format {FORMAT_VERSION}. Install a newer sparkdl."
            )
        return names[-1], manifest

    def begin(self, step: int) -> str:
        """Remove unfinished checkpoints, make the folder of a new one and return its name."""
        found = self._all()
        for _, _, name in found:
            if not self._has_manifest(name):
                self._remove(name)
        name = f"checkpoint-{max((number for number, _, _ in found), default=0) + 1:08d}-step-{step:08d}"
        self.location(name).make_folder()
        return name

    def commit(self, name: str, manifest: Mapping[str, Any]) -> None:
        """Write the manifest, which completes the checkpoint, and remove checkpoints that are no longer kept."""
        content = json.dumps(manifest, separators=(",", ":")).encode()
        self.location(name).write_whole(MANIFEST, content)
        try:
            old = self.complete()[: -self._num_kept]
        except StoreError as error:  # training does not depend on it
            logger.warning("Checkpoints that are no longer kept could not be removed: %s", error)
            return
        for _, _, other in old:
            self._remove(other)

    def _remove(self, name: str) -> None:
        path = f"{self._location.path}/{name}"
        filesystem = self._location.filesystem
        try:
            with suppress(FileNotFoundError):
                filesystem.rm(f"{path}/{MANIFEST}")
            with suppress(FileNotFoundError):
                filesystem.rm(path, recursive=True)
            filesystem.invalidate_cache()
        except Exception as error:  # training does not depend on it
            logger.warning(
                "The checkpoint %s/%s could not be removed: %s", self.url, name, explain_failure(error)
            )


@contextmanager
def _reading(url: str) -> Iterator[None]:
    """Raise an error of the filesystem as a StoreError, and a missing file as a CheckpointError, that name the URL."""
    try:
        yield
    except SparkdlError:
        raise
    except FileNotFoundError as error:
        raise _damaged(url, "it is missing") from error
    except Exception as error:
        raise store_error(f"{url} cannot be read", error) from error


def _damaged(url: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{url} is damaged: {why}. Remove the folder of this checkpoint to load the one before it."
    )


def _open(folder: Location, name: str) -> IO[bytes]:
    return cast("IO[bytes]", folder.filesystem.open(f"{folder.path}/{name}", "rb"))


def check_files(folder: Location, manifest: Mapping[str, Any], rank: int = 0, world_size: int = 1) -> None:
    """Read the files of a checkpoint once and compare their sizes and checksums with the manifest.

    Args:
        folder: folder of the checkpoint.
        manifest: its manifest.
        rank: rank that calls, which reads its share of the files.
        world_size: number of ranks that call.

    Raises:
        CheckpointError: if a file is missing or damaged.
        StoreError: if the folder cannot be read.
    """
    for name in (name for writer in range(rank, manifest["ranks"], world_size) for name in _files_of(writer)):
        url, expected = folder.name_of(f"{folder.path}/{name}"), manifest["files"][name]
        digest, num_bytes = hashlib.sha256(), 0
        with _reading(url), _open(folder, name) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                num_bytes += len(chunk)
        if num_bytes != expected["bytes"]:
            raise _damaged(url, f"it has {num_bytes} bytes instead of {expected['bytes']}")
        if digest.hexdigest() != expected["sha256"]:
            raise _damaged(url, "its content does not match its checksum")


def newest_checkpoint(url: str) -> tuple[Location, dict[str, Any]]:
    """Return the location of the newest checkpoint of a folder, and its manifest.

    Raises:
        CheckpointError: if there is no checkpoint.
        StoreError: if the folder cannot be read.
    """
    checkpoints = CheckpointFolder(url, num_kept=1)
    found = checkpoints.find(None)
    if found is None:
        raise CheckpointError(f"There is no sharded checkpoint in {checkpoints.url}.")
    return checkpoints.location(found[0]), found[1]


def check_sizes(url: str) -> None:
    """Compare the sizes of all files of the newest checkpoint with its manifest, without reading them.

    Raises:
        CheckpointError: if there is no checkpoint, or a file is missing or has another size.
        StoreError: if the folder cannot be read.
    """
    folder, manifest = newest_checkpoint(url)
    for file, expected in manifest["files"].items():
        path = f"{folder.path}/{file}"
        with _reading(folder.name_of(path)):
            num_bytes = folder.filesystem.size(path)
        if num_bytes != expected["bytes"]:
            raise _damaged(folder.name_of(path), f"it has {num_bytes} bytes instead of {expected['bytes']}")


def _files_of(rank: int) -> tuple[str, str]:
    return f"rank-{rank:05d}.safetensors", f"rank-{rank:05d}.pt"


def read_small_file(folder: Location, rank: int) -> dict[str, Any]:
    """Return the content of the ``.pt`` file of a rank of the checkpoint."""
    name = _files_of(rank)[1]
    with _reading(folder.name_of(f"{folder.path}/{name}")), _open(folder, name) as file:
        content: dict[str, Any] = torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
    return content


def _entry(name: str, offsets: Sequence[int]) -> str:
    """The name of a tensor's part in a file."""
    return f"{name}@{','.join(map(str, offsets))}"


class Writer(StorageWriter):
    """Writes one checkpoint for ``torch.distributed.checkpoint``. Runs on the checkpoint thread of each rank."""

    def __init__(
        self, folder: CheckpointFolder, *, rank: int, small: bytes, report: Report, sizes: dict[str, int]
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._small = small
        self._report = report
        self._sizes = sizes
        self._name = ""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003 - torch passes it
        """Return False: torch must not choose this class by the name of a folder."""
        return False

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: an object serves one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the constructor has set everything up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the planner's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: begin the checkpoint and put its name in the plans of all ranks."""
        self._name = self._folder.begin(self._report.step)
        return [replace(plan, storage_data=self._name) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write the files of this rank."""
        folder = self._folder.location(plan.storage_data)
        weights_name, small_name = _files_of(self._rank)
        parts = [(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items]
        tensors = {
            _entry(*part): planner.resolve_data(item) for part, item in zip(parts, plan.items, strict=True)
        }
        with folder.filesystem.open(f"{folder.path}/{weights_name}", "wb") as file:
            weights = write_weights(cast("dict[str, Tensor]", tensors), file)
        with folder.filesystem.open(f"{folder.path}/{small_name}", "wb") as file:
            hashing = HashingFile(file)
            hashing.write(self._small)
        files = {weights_name: weights, small_name: hashing.describe()}
        future: Future[Any] = Future()
        future.set_result(replace(self._report, files=files, parts=parts))
        return future

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """On rank 0, after all ranks have written: complete the checkpoint."""
        reports: list[Report] = results
        if len(steps := {report.step for report in reports}) > 1:
            raise CheckpointError(f"Ranks gave save() different steps: {', '.join(map(str, sorted(steps)))}.")
        writers = {part: rank for rank, report in enumerate(reports) for part in report.parts}
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata), "nothing else is saved"
            tensors[name] = {
                "dtype": str(stored.properties.dtype).removeprefix("torch."),
                "shape": list(stored.size),
                "parts": [
                    [list(chunk.offsets), list(chunk.sizes), writers[name, tuple(chunk.offsets)]]
                    for chunk in stored.chunks
                ],
            }
        groups = [report.groups for report in reports if report.groups is not None]
        self._folder.commit(
            self._name,
            {
                "format_version": FORMAT_VERSION,
                "sparkdl_version": __version__,
                "torch_version": str(torch.__version__),
                "step": self._report.step,
                "sizes": self._sizes,
                "ranks": len(reports),
                "readers": [report.reader for report in reports],
                "groups": {name: number for each in groups for name, number in each.items()}
                if groups
                else None,
                "files": {name: entry for report in reports for name, entry in report.files.items()},
                "tensors": tensors,
            },
        )


class Reader(StorageReader):
    """Reads one checkpoint for ``torch.distributed.checkpoint``."""

    def __init__(self, folder: Location, manifest: Mapping[str, Any]) -> None:
        self._folder = folder
        self._tensors: Mapping[str, Any] = manifest["tensors"]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003 - torch passes it
        """Return False: torch must not choose this class by the name of a folder."""
        return False

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: an object serves one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - torch passes them
        """Shapes and parts of the tensors, from the manifest."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, entry["dtype"])),
                    torch.Size(entry["shape"]),
                    [
                        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                        for offsets, sizes, _ in entry["parts"]
                    ],
                )
                for name, entry in self._tensors.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the constructor has set everything up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the planner's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the planner's plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the parts of tensors that this rank needs: of each saved part, the rows that its own part overlaps."""
        writers = {
            _entry(name, offsets): rank
            for name, entry in self._tensors.items()
            for offsets, _, rank in entry["parts"]
        }
        items_of: dict[int, list[tuple[str, Any]]] = defaultdict(list)
        for item in plan.items:
            entry = _entry(item.storage_index.fqn, tuple(item.storage_index.offset or ()))
            items_of[writers[entry]].append((entry, item))
        for rank, items in sorted(items_of.items()):
            name = _files_of(rank)[0]
            with (
                _reading(self._folder.name_of(f"{self._folder.path}/{name}")),
                _open(self._folder, name) as file,
            ):
                header = read_header(file)
                for entry, item in sorted(items, key=lambda each: header[each[0]].begin):
                    stored = header[entry]
                    first, *others = item.storage_offsets or (0,)
                    count, *lengths = item.lengths or (1,)
                    if not stored.shape:
                        stored = replace(stored, shape=(1,))
                    part = read_rows(file, stored, first, count)
                    for dim, (offset, length) in enumerate(zip(others, lengths, strict=True), start=1):
                        part = part.narrow(dim, offset, length)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part.view(target.shape) if target.ndim == 0 else part)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future
