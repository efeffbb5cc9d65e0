"""The format of a checkpoint, and the folder that holds the checkpoints of one fit, script or state.

A checkpoint is a folder such as ``fit-00000003-epoch-00002-step-00000120-1a2b3c4d``: the third checkpoint of a fit.

=============================  ======================================================================================
``sparkdl_checkpoint.json``    the manifest: what the checkpoint is of, shapes and parts of all tensors, size and
                               SHA-256 of the other files; written last
``rank-00000.safetensors``     the parts of tensors that a rank has written, each as ``name@offsets``
``rank-00000.pt``              other state of a rank; the file of rank 0 also holds the state that is the same on all
                               ranks. An archive of torch, loaded with ``weights_only=True``
=============================  ======================================================================================

If a model is not divided among ranks, rank 0 writes all of it. No file holds code.

The manifest commits a checkpoint: it is written when all files are. A folder without one is an unfinished checkpoint,
which is never loaded, and removed by the next commit. The folder may be on any filesystem that a Store may be on. Every
rank reads and writes files; rank 0 begins, commits and removes checkpoints. The functions that need torch import it, as
a driver may have none.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import shutil
import tempfile
import uuid
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import IO, TYPE_CHECKING, Any, cast

from sparkdl import __version__
from sparkdl.checks import check_format
from sparkdl.data.files.filesystems import Location, absolute_url, open_location
from sparkdl.data.store.housekeeping import list_folders, remove_folder
from sparkdl.errors import CheckpointError, StoreError
from sparkdl.foreign_errors import explain_failure, store_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from torch import Tensor

logger = logging.getLogger(__name__)

FORMAT = 1
"""From version 0.1.0 of sparkdl on, later versions read the formats of earlier ones."""

MANIFEST = "sparkdl_checkpoint.json"

_CHUNK_BYTES = 4 << 20


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, or differs from what was written.

    Args:
        url: URL of the file.
        reason: what is wrong with it.
    """

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(url, reason)
        self.url, self.reason = url, reason

    def __str__(self) -> str:
        return (
            f"{self.url} is damaged: {self.reason}. Load no step or another one to use an earlier checkpoint."
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a checkpoint and of its files.

    Attributes:
        about: description by the writer, of types of JSON.
        is_best: whether the checkpoint is kept until there is a better one.
        ranks: description by each rank that has written.
        groups: index of the optimizer's group of each parameter, by its name; None without an optimizer.
        tensors: dtype, shape and parts of each tensor, by its name; a part is its offsets, its sizes and the rank that
            has written it.
        files: size and SHA-256 of each file, by its name.
    """

    about: dict[str, Any]
    is_best: bool = False
    ranks: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    groups: dict[str, int] | None = None
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the content of the manifest's file."""
        import torch

        content = {
            "format": FORMAT,
            "sparkdl_version": __version__,
            "torch_version": str(torch.__version__),
            **asdict(self),
        }
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes, url: str) -> Manifest:
        """Parse the content of a manifest's file.

        Raises:
            DamagedCheckpointError: if it is not a manifest.
            CheckpointError: if a newer version of sparkdl wrote it.
        """
        try:
            content = json.loads(text)
            check_format(url, content, FORMAT, CheckpointError)
            return cls(**{name: content[name] for name in cls.__dataclass_fields__})
        except CheckpointError:  # a ValueError, too
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpointError(url, f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        url: URL of its folder.
        manifest: its manifest.
    """

    url: str
    manifest: Manifest

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.url.rpartition("/")[2]

    def check(self, rank: int = 0, world_size: int = 1) -> None:
        """Read the files once and compare their sizes and checksums with the manifest.

        Args:
            rank: rank that calls, which reads its share of the files.
            world_size: number of ranks that call.

        Raises:
            DamagedCheckpointError: if a file is missing or differs.
            StoreError: if the folder cannot be read.
        """
        from sparkdl.model.weights_file import verify_file

        location = open_location(self.url)
        for name in sorted(self.manifest.files)[rank::world_size]:
            with open_file(location, name) as file:
                verify_file(
                    file, self.manifest.files[name], partial(DamagedCheckpointError, f"{self.url}/{name}")
                )

    def load_state(self, rank: int = 0) -> dict[str, Any]:
        """Return the content of a rank's ``.pt`` file, its tensors on the CPU.

        Raises:
            DamagedCheckpointError: if it cannot be read.
            StoreError: if the folder cannot be read.
        """
        import torch

        name, location = state_file(rank), open_location(self.url)
        with open_file(location, name) as file:
            try:
                if location.is_local:
                    content = torch.load(file, map_location="cpu", weights_only=True)
                else:
                    # torch reads an archive with many seeks; from an object store one sequential copy is faster.
                    with tempfile.TemporaryFile() as copy:
                        shutil.copyfileobj(file, copy, _CHUNK_BYTES)
                        copy.seek(0)
                        content = torch.load(copy, map_location="cpu", weights_only=True)
            except (RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
                raise DamagedCheckpointError(
                    f"{self.url}/{name}", f"{type(error).__name__}: {error}"
                ) from error
        return cast("dict[str, Any]", content)


def tensor_file(rank: int) -> str:
    """Return the name of the file of a rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def state_file(rank: int) -> str:
    """Return the name of the file of a rank's other state."""
    return f"rank-{rank:05d}.pt"


@contextmanager
def open_file(location: Location, name: str) -> Iterator[IO[bytes]]:
    """Open a file of a checkpoint for reading.

    Raises:
        DamagedCheckpointError: if it is missing.
        StoreError: if it cannot be read.
    """
    path = f"{location.path}/{name}"
    with store_errors(f"{location.name_of(path)} cannot be read"):
        try:
            with location.filesystem.open(path, "rb") as file:
                yield file
        except FileNotFoundError as error:
            raise DamagedCheckpointError(location.name_of(path), "it is missing") from error


def write_files(
    location: Location, rank: int, tensors: Mapping[str, Tensor], state: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Write the files of a rank into the folder of a checkpoint, and return size and SHA-256 of each, by its name."""
    import torch

    from sparkdl.model.weights_file import HashingFile, write_weights

    files = {}
    if tensors:
        with location.filesystem.open(f"{location.path}/{tensor_file(rank)}", "wb") as file:
            files[tensor_file(rank)] = write_weights(tensors, file)
    if state:
        with location.filesystem.open(f"{location.path}/{state_file(rank)}", "wb") as file:
            hashing = HashingFile(file)
            torch.save(state, cast("IO[bytes]", hashing))
        files[state_file(rank)] = hashing.describe()
    return files


class CheckpointFolder:
    """The checkpoints of one kind in a folder.

    Args:
        url: local or shared path, or a URL that a Store accepts.
        kind: beginning of the names of the checkpoints; a folder may have checkpoints of several kinds.
        num_kept: number of the newest checkpoints to keep, in addition to the best one.
        check: function that raises an error if this process may no longer write; None if it always may.

    Attributes:
        url: absolute URL of the folder.
        damaged: names of the checkpoints that :meth:`newest` has skipped; the next commit removes them.
    """

    def __init__(
        self, url: str, kind: str, *, num_kept: int = 1, check: Callable[[], None] | None = None
    ) -> None:
        self.url = absolute_url(url)
        self.damaged: Collection[str] = ()
        self._location = open_location(self.url)
        self._kind, self._num_kept = kind, num_kept
        self._check = check or (lambda: None)
        self._name = re.compile(rf"{re.escape(kind)}-(\d+)-(?:.+-)?[0-9a-f]{{8}}$")

    def location(self, name: str) -> Location:
        """Return the location of a checkpoint's files."""
        return open_location(f"{self.url}/{name}")

    def names(self) -> list[str]:
        """Return the names of all checkpoints, complete or not, the oldest first.

        Raises:
            StoreError: if the folder cannot be listed.
        """
        filesystem = self._location.filesystem
        with store_errors(f"The checkpoints in {self.url} cannot be listed"):
            filesystem.invalidate_cache()
            names = list_folders(self._location) if filesystem.exists(self._location.path) else []
        return sorted(filter(self._name.match, names), key=self.number)

    def number(self, name: str) -> int:
        """Return the number of a checkpoint, by its name; numbers rise in the order in which checkpoints are begun."""
        match = self._name.match(name)
        assert match is not None, "the name of a checkpoint"
        return int(match[1])

    def open(self, name: str) -> Checkpoint:
        """Return a checkpoint.

        Raises:
            DamagedCheckpointError: if it has no manifest, as it was not written to its end, or a damaged one.
            CheckpointError: if a newer version of sparkdl wrote it.
            StoreError: if the folder cannot be read.
        """
        url = f"{self.url}/{name}"
        try:
            with open_file(self.location(name), MANIFEST) as file:
                text = file.read()
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(url, "it was not written to its end") from error
        return Checkpoint(url, Manifest.from_json(text, f"{url}/{MANIFEST}"))

    def is_complete(self, name: str) -> bool:
        """Return whether a checkpoint has a manifest.

        Raises:
            StoreError: if the folder cannot be read.
        """
        with store_errors(f"{self.url}/{name} cannot be read"):
            return bool(self._location.filesystem.exists(f"{self._location.path}/{name}/{MANIFEST}"))

    def newest(
        self,
        accept: Callable[[Checkpoint], None] | None = None,
        *,
        share: tuple[int, int] = (0, 1),
        on_all_ranks: Callable[[Callable[[], Any]], list[Any]] = lambda work: [work()],
        is_look: bool = False,
    ) -> Checkpoint | None:
        """Return the newest intact checkpoint, whose files match their checksums; None if there is none.

        Damaged and incomplete checkpoints are skipped with a warning, and are the new value of ``damaged``. Collective
        if several ranks share the work: rank 0 chooses, and each rank reads its share of the files.

        Args:
            accept: function that raises an error if training must not continue from a checkpoint with this manifest;
                called by rank 0 before the files are read.
            share: rank that calls, and number of ranks that call.
            on_all_ranks: function that calls its argument on every rank and returns all results, in order of rank; the
                results are values of JSON.
            is_look: whether the files are left unread, and nothing is logged.

        Raises:
            CheckpointError: if ``accept`` raises it, or if a newer version of sparkdl wrote the checkpoint.
            StoreError: if the folder cannot be read, or a rank does not find the checkpoint that rank 0 finds.
        """
        rank = share[0]
        skipped: list[str] = []
        opened: dict[str, Checkpoint] = {}

        def choose() -> str | None:
            for name, checkpoint in self._newest_first() if rank == 0 else ():
                if name in skipped:
                    continue
                if isinstance(checkpoint, Checkpoint):
                    if accept is not None:
                        accept(checkpoint)
                    opened[name] = checkpoint
                    return name
                skip(name, checkpoint)
            return None

        def is_damaged() -> bool:
            if rank != 0 and not self.is_complete(name):
                raise StoreError(
                    f"Rank {rank} finds no checkpoint {name} in {self.url}, and rank 0 does. Choose a folder that all "
                    "ranks share."
                )
            try:
                if name not in opened:
                    opened[name] = self.open(name)
                opened[name].check(*share)
            except DamagedCheckpointError as error:
                skip(name, error)
            return name in skipped

        def skip(name: str, error: DamagedCheckpointError) -> None:
            skipped.append(name)
            if not is_look:
                logger.warning(
                    "A checkpoint is skipped, and an earlier one is tried: in %s, %s.",
                    error.url,
                    error.reason,
                )

        while name := on_all_ranks(choose)[0]:
            if is_look or not any(on_all_ranks(is_damaged)):
                break
            if name not in skipped:
                skipped.append(name)
        self.damaged = skipped
        if name:
            return opened[name]
        if skipped and rank == 0 and not is_look:
            logger.warning("%s holds no other checkpoint: training starts from the beginning.", self.url)
        return None

    def _newest_first(self) -> Iterator[tuple[str, Checkpoint | DamagedCheckpointError]]:
        """Names and checkpoints, the newest first; for a damaged checkpoint the error in its place."""
        for name in reversed(self.names()):
            try:
                yield name, self.open(name)
            except DamagedCheckpointError as error:
                yield name, error

    def begin(self, label: str = "") -> str:
        """Make the folder of a new checkpoint and return its name.

        The name is unique: ranks that were wrongly considered lost may still write a checkpoint of the same number.

        Args:
            label: text that tells people where training was; empty for none.
        """
        self._check()
        number = max(map(self.number, self.names()), default=0) + 1
        name = "-".join(filter(None, (self._kind, f"{number:08d}", label, uuid.uuid4().hex[:8])))
        self.location(name).make_folder()
        return name

    def commit(self, name: str, manifest: Manifest) -> None:
        """Write the manifest, which completes the checkpoint, and remove checkpoints that are no longer kept.

        Args:
            name: name of the checkpoint.
            manifest: its manifest.
        """
        self._check()  # again, as writing may have taken long
        self.location(name).write_whole(MANIFEST, manifest.to_json())
        try:
            self._remove_old(name)
        except Exception as error:  # training does not depend on it
            logger.warning("Checkpoints that are no longer kept could not be removed: %s", error)

    def _remove_old(self, committed: str) -> None:
        """Remove checkpoints that were begun before one that is complete, unless they are kept.

        A later one without a manifest is being written by the ranks of a restart, if this one was considered lost.
        """
        self._check()
        names, complete, best = [], [], None
        for name, checkpoint in self._newest_first():
            names.append(name)
            if isinstance(checkpoint, Checkpoint) and name not in self.damaged:
                complete.append(name)
                if best is None and checkpoint.manifest.is_best:
                    best = name
        for name in names:
            is_kept = name in complete[: self._num_kept] or name == best
            if self.number(name) < self.number(committed) and not is_kept:
                self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first; a failure is logged."""
        try:
            remove_folder(self.location(name), MANIFEST)
        except Exception as error:  # training does not depend on it
            logger.warning(
                "The checkpoint %s/%s could not be removed: %s", self.url, name, explain_failure(error)
            )
