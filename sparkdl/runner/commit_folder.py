"""The folder for the commits of a run: a file for each state, replaced atomically, on any filesystem of a Store.

The *driver* claims the folder and finds the last commit; *rank 0* writes and reads. If a state has sharded parts, every
rank writes its pieces to a file of its own, and rank 0's file, written afterwards, names them. A killed process leaves
at worst an incomplete file, or one that no other file names, which is never read. Files are archives of torch, loaded
with ``weights_only=True``, so that loading runs no code of theirs.
"""

from __future__ import annotations

import io
import json
import os
import re
import socket
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from sparkdl.data import Store
from sparkdl.data.files.filesystems import absolute_url, open_location
from sparkdl.errors import CheckpointError, CheckpointsInUseError, ParamError, StoreError
from sparkdl.meanings import store_error

_OWNER = "owner.json"
_NAME = re.compile(r"state-(\d+)-commit-(\d+)\.pt")
_PIECE = re.compile(r"state-(\d+)-commit-(\d+)-rank-\d+-([^.-]+)\.pt")


@dataclass(frozen=True)
class CommitFolder:
    """The folder of one run.

    Attributes:
        url: path or URL of the folder.
        token: token of this start of the ranks; each later start writes its own token to the folder.
    """

    url: str
    token: str

    def claim(self) -> None:
        """Claim the folder for this run. Runs on the *driver*.

        Raises:
            StoreError: if the folder cannot be written.
        """
        location = open_location(self.url)
        try:
            location.make_folder()
            location.write_whole(
                _OWNER, json.dumps({"run": self.token}).encode()
            )  # ranks may read it meanwhile
            location.filesystem.invalidate_cache()
            for entry in location.filesystem.ls(location.path, detail=False):
                if re.fullmatch(r"state-.*\.tmp", str(entry).rsplit("/", 1)[-1]):  # left by killed ranks
                    with suppress(FileNotFoundError):
                        location.filesystem.rm(str(entry))
        except Exception as error:
            raise store_error(
                f"The commits of a run cannot be kept in {self.url}",
                error,
                "Choose a checkpoint_dir that the driver and every executor can write.",
            ) from error

    def reclaimed(self) -> CommitFolder:
        """Claim the folder for restarted ranks, from the ranks before the restart. Runs on the *driver*.

        A rank that was wrongly considered lost must not write to the folder from which the others continue.

        Raises:
            StoreError: if the folder cannot be read or written.
            CheckpointsInUseError: if another run has claimed it.
        """
        self._check_owner()
        return _claimed(self.url)

    def keep(self, state: int, contents: dict[str, dict[str, Any]]) -> None:
        """Write a commit and remove the previous one; see :class:`sparkdl.horovod.torch.elastic.CommitKeeper`.

        Raises:
            ParamError: if a value of the state cannot be loaded again.
            StoreError: if the commit cannot be written.
            CheckpointsInUseError: if another run, or the ranks of a restart, have claimed the folder.
        """
        self._check_owner()
        before = self._commits(state)
        _check_loadable(contents["objects"])
        commit = max(before, default=0) + 1
        if "pieces" in contents:
            contents = {**contents, "pieces": {**contents["pieces"], "commit": commit, "run": self.token}}
        self._write(f"state-{state}-commit-{commit}.pt", contents, is_first=not before)
        location = open_location(self.url)
        old = [f"state-{state}-commit-{number}.pt" for number in before]
        for name in self._names() if "pieces" in contents else ():
            piece = _PIECE.fullmatch(name)
            # Other ranks may already write the pieces of the next commit.
            if piece and int(piece[1]) == state and (int(piece[2]) < commit or piece[3] != self.token):
                old.append(name)
        for name in old:
            with suppress(FileNotFoundError):
                location.filesystem.rm(f"{location.path}/{name}")

    def next_commit(self, state: int) -> int:
        """See :class:`sparkdl.horovod.torch.elastic.CommitKeeper`.

        Raises:
            StoreError: if the folder cannot be read.
        """
        return max(self._commits(state), default=0) + 1

    def keep_piece(self, state: int, commit: int, rank: int, parts: dict[str, Any]) -> None:
        """Write a rank's pieces of a commit; see :class:`sparkdl.horovod.torch.elastic.CommitKeeper`.

        Raises:
            ParamError: if a value cannot be loaded again.
            StoreError: if the pieces cannot be written.
            CheckpointsInUseError: if another run, or the ranks of a restart, have claimed the folder.
        """
        self._check_owner()
        self._write(self._piece_name(state, commit, rank, self.token), {"parts": parts}, is_first=commit == 1)

    def piece(self, state: int, pieces: dict[str, Any], rank: int) -> dict[str, Any]:
        """Read a rank's pieces of a commit; see :class:`sparkdl.horovod.torch.elastic.CommitKeeper`.

        Raises:
            StoreError: if the folder cannot be read.
            CheckpointError: if the file is missing or damaged.
        """
        name = self._piece_name(state, pieces["commit"], rank, pieces["run"])
        parts: dict[str, Any] = self._read(name)["parts"]
        return parts

    @staticmethod
    def _piece_name(state: int, commit: int, rank: int, token: str) -> str:
        # With the token, as ranks that were wrongly considered lost may still write their pieces.
        return f"state-{state}-commit-{commit}-rank-{rank}-{token}.pt"

    def _write(self, name: str, contents: dict[str, Any], *, is_first: bool) -> None:
        """Write a file atomically; check whether the first one can be loaded again."""
        from sparkdl.training.checkpoint.files import write_file

        location = open_location(self.url)
        if is_first and not location.is_local:
            _check_loadable(contents["parts"])
        # Object stores write files atomically; elsewhere renaming is atomic.
        written = f"{name}.{self.token}.tmp" if location.can_rename else name
        try:
            write_file(location, written, contents)
            if is_first and location.is_local:
                _check_written(f"{location.path}/{written}", contents["parts"])
            self._check_owner()  # again, as writing may have taken long
            if written != name:
                location.rename(f"{location.path}/{written}", f"{location.path}/{name}")
        except Exception as error:
            if written != name:
                with suppress(OSError):
                    location.filesystem.rm(f"{location.path}/{written}")
            if isinstance(error, CheckpointsInUseError | ParamError):
                raise
            if is_first:
                _check_loadable(contents["parts"])
            raise store_error(f"A commit cannot be written to {self.url}", error) from error

    def last(self, state: int) -> dict[str, dict[str, Any]] | None:
        """Read the last commit; see :class:`sparkdl.horovod.torch.elastic.CommitKeeper`.

        Raises:
            StoreError: if the folder cannot be read.
            CheckpointError: if the file is damaged.
            CheckpointsInUseError: if another run has claimed the folder.
        """
        self._check_owner()
        numbers = self._commits(state)
        return self._read(f"state-{state}-commit-{max(numbers)}.pt") if numbers else None

    def _read(self, name: str) -> dict[str, dict[str, Any]]:
        from sparkdl.training.checkpoint.files import DamagedFileError, load_file

        try:
            contents: dict[str, dict[str, Any]] = load_file(open_location(self.url), name)
        except DamagedFileError as error:
            raise CheckpointError(
                f"The last commit, {self.url}/{name}, is damaged. Remove it, or choose another checkpoint_dir."
            ) from error
        except OSError as error:
            raise store_error(f"{self.url}/{name} cannot be read", error) from error
        return contents

    def position(self) -> str:
        """Describe the point from which the ranks continue. Runs on the *driver*."""
        numbers = self._commits(0)
        return f"commit {max(numbers)} of its state" if numbers else "the beginning, as nothing was committed"

    def _commits(self, state: int) -> list[int]:
        found = (_NAME.fullmatch(name) for name in self._names())
        return sorted(int(each[2]) for each in found if each is not None and int(each[1]) == state)

    def _names(self) -> list[str]:
        location = open_location(self.url)
        try:
            location.filesystem.invalidate_cache()
            entries = location.filesystem.ls(location.path, detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise store_error(f"The commits in {self.url} cannot be listed", error) from error
        return [str(entry).rsplit("/", 1)[-1] for entry in entries]

    def _check_owner(self) -> None:
        location = open_location(self.url)
        host = socket.gethostname()
        try:
            with location.filesystem.open(f"{location.path}/{_OWNER}", "rb") as file:
                owner = json.loads(file.read()).get("run")
        except FileNotFoundError:
            raise StoreError(
                f"The state's commits cannot be written to {self.url}, which {host} cannot reach. "
                "Give the Runner a checkpoint_dir that the driver and every executor reach, or set SPARKDL_STORE to "
                "such a folder."
            ) from None
        except Exception as error:
            raise store_error(f"{self.url} cannot be read on {host}", error) from error
        if owner != self.token:
            raise CheckpointsInUseError(
                f"Another run has claimed the checkpoint_dir {self.url} since this one began, or this rank was taken "
                "for lost and the ranks were restarted. Give each run its own folder."
            )


@contextmanager
def commit_folder(
    checkpoint_dir: str | os.PathLike[str] | None, *, is_wanted: bool, is_local: bool
) -> Iterator[CommitFolder | None]:
    """Make and claim the folder for the commits of a run. Runs on the *driver*.

    Args:
        checkpoint_dir: the user's folder, which is kept; None for a folder that is removed at the end.
        is_wanted: whether ranks may be restarted.
        is_local: whether all ranks run on this machine; otherwise the folder is in the default Store.

    Raises:
        StoreError: if the folder cannot be written.
    """
    if checkpoint_dir is not None:
        yield _claimed(absolute_url(checkpoint_dir))
    elif not is_wanted:
        yield None
    elif is_local:
        with tempfile.TemporaryDirectory(prefix="sparkdl-commits-", ignore_cleanup_errors=True) as path:
            yield _claimed(path)
    else:
        with Store.default().scratch_folder("commits") as url:
            yield _claimed(url)


def _claimed(url: str) -> CommitFolder:
    folder = CommitFolder(url, uuid.uuid4().hex)
    folder.claim()
    return folder


def _check_written(path: str, parts: dict[str, Any]) -> None:
    """Raise if a local file cannot be loaded again; the file is mapped, which takes no memory."""
    import torch

    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # a value cannot be loaded, which the check names, or the filesystem cannot map files
        _check_loadable(parts)


def _check_loadable(values: dict[str, Any]) -> None:
    """Raise if a value can be written but not loaded again."""
    import torch

    for name, value in values.items():
        copy = io.BytesIO()
        try:
            torch.save(value, copy)
            copy.seek(0)
            torch.load(copy, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ParamError(
                f"The state's {name} is a {type(value).__name__}, which a commit cannot hold. It can hold tensors, "
                "numbers, strings, and lists and dictionaries of them; convert NumPy's by float() and .tolist()."
            ) from error
