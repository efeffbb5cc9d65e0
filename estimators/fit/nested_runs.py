"""The MLflow runs of fits that belong together, nested under one run, and the Store's folder of unsent runs.

Fits belong together if they come from one call of ``fit(df, maps)`` or ``fitMultiple``, or from one search of
``CrossValidator`` or ``TrainValidationSplit``. A search calls ``fitMultiple`` once per fold, then ``fit`` for the
best map, and passes no reference to itself. So the search is found in the call stack, as the object whose ``_fit`` is
running. :class:`RunOptions` says whether a fit is alone, or belongs to several Param maps or to the folds of a search.

Data that MLflow did not accept are kept in the folder ``unsent-runs`` of the Store, beside its datasets.
"""

from __future__ import annotations

import atexit
import sys
import threading
import uuid
import weakref
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sparkdl.data.files.filesystems import open_location
from sparkdl.meanings import store_error
from sparkdl.tracking import RunGroup, TrackingMode, open_group

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from sparkdl.data import Store
    from sparkdl.estimators.torch_estimator import FittingEstimator


FOLDER = "unsent-runs"


class UnsentRuns:
    """Folders of unsent runs in a Store; implements :class:`sparkdl.tracking.Shelf`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._location = store.location
        self._path = f"{self._location.path}/{FOLDER}"

    def put(self, name: str, folders: Mapping[str, Path], files: Mapping[str, bytes]) -> str:
        """Copy local folders and then files into a folder of the Store, and return its URL.

        Raises:
            StoreError: if the Store cannot be written.
        """
        url = f"{self._store.url}/{FOLDER}/{name}"
        try:
            there = open_location(url)
            there.make_folder()
            for each, folder in folders.items():
                open_location(f"{url}/{each}").put_folder(folder)
            for each, content in files.items():
                there.write_whole(each, content, writer=uuid.uuid4().hex[:8])
        except Exception as error:
            raise self._store.cannot_be_written(error) from error
        return url

    def names(self) -> list[str]:
        """Return the names of the folders, the oldest first.

        Raises:
            StoreError: if the Store cannot be read.
        """
        filesystem = self._location.filesystem
        try:
            filesystem.invalidate_cache()
            if not filesystem.exists(self._path):
                return []
            return sorted(Path(each).name for each in filesystem.ls(self._path, detail=False))
        except Exception as error:
            raise store_error(f"{self._path} cannot be listed", error) from error

    def holds(self, name: str, file: str) -> bool:
        """Return whether a folder has a file.

        Raises:
            StoreError: if the Store cannot be read.
        """
        try:
            return bool(self._location.filesystem.exists(f"{self._path}/{name}/{file}"))
        except Exception as error:
            raise store_error(f"{self._path}/{name} cannot be read", error) from error

    def get(self, name: str, into: Path) -> None:
        """Copy a folder into an existing local folder.

        Raises:
            StoreError: if the folder cannot be read.
        """
        try:
            open_location(f"{self._store.url}/{FOLDER}/{name}").fetch_folder(into)
        except Exception as error:
            raise store_error(f"{self._path}/{name} cannot be read", error) from error

    def remove(self, name: str) -> None:
        """Remove a folder; with the last one also its parent folder.

        Raises:
            StoreError: if the folder cannot be removed.
        """
        filesystem = self._location.filesystem
        try:
            filesystem.rm(f"{self._path}/{name}", recursive=True)
            filesystem.invalidate_cache()
            if filesystem.exists(self._path) and not filesystem.ls(self._path, detail=False):
                filesystem.rm(self._path, recursive=True)
        except Exception as error:
            raise store_error(f"{self._path}/{name} cannot be removed", error) from error


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The group and the tags of a fit's MLflow run.

    Attributes:
        group: group to which the fit's run belongs; None if the fit is alone, or not tracked.
        tags: tags that distinguish the fit's run from other runs of the group.
    """

    group: RunGroup | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


ALONE = RunOptions()


class NestedRuns:
    """The MLflow runs of several Param maps, on one fold of a search or without a search.

    Args:
        group: group of the runs.
        fold: number of the fold, from 0; None without a search, in which case the group is closed with this object.
    """

    def __init__(self, group: RunGroup, fold: int | None) -> None:
        self._group, self._fold = group, fold
        if fold is None:
            weakref.finalize(self, group.close)

    def options(self, index: int) -> RunOptions:
        """Return the group and tags of the fit of a Param map, by its index."""
        tags = {"sparkdl.param_map": str(index)}
        if self._fold is not None:
            tags["sparkdl.fold"] = str(self._fold)
        return RunOptions(group=self._group, tags=tags)

    def end_as_failed(self) -> None:
        """End the parent run as failed, because a fit has failed and with it the search or call that it belongs to."""
        with _lock:
            _searches[:] = [each for each in _searches if each.group is not self._group]
        self._group.note_failure()
        self._group.close()


class _Search:
    """A running search: its frame, which distinguishes it from other searches, and the group of its runs.

    The frame keeps the search's DataFrames and models alive. A search is therefore removed after its last fit, or when
    one of its fits fails. If another error ended it, for example in its evaluator, it is removed at the start of the
    next fit.
    """

    def __init__(self, frame: FrameType, group: RunGroup) -> None:
        self.frame, self.group, self.num_folds = frame, group, 0


_searches: list[_Search] = []
_lock = threading.Lock()


def nested_runs(estimators: Sequence[FittingEstimator[Any]]) -> NestedRuns | None:
    """Return the runs for the fits of several Param maps; None if untracked, or for one map outside a search.

    Args:
        estimators: one estimator for each map.
    """
    frame = _frame_of_search()
    if not estimators or (frame is None and len(estimators) == 1):
        return None
    if frame is None:
        name = f"{type(estimators[0]).__name__}, {len(estimators)} Param maps"
        group = _open(estimators[0], name)
        return None if group is None else NestedRuns(group, None)
    with _lock:
        _end_those_that_broke_off()
        search = next((each for each in _searches if each.frame is frame), None)
        if search is None:
            group = _open(estimators[0], type(frame.f_locals["self"]).__name__)
            if group is None:
                return None
            search = _Search(frame, group)
            _searches.append(search)
        fold = search.num_folds
        search.num_folds += 1
        return NestedRuns(search.group, fold)


@contextmanager
def options_of_single_run() -> Iterator[RunOptions]:
    """Give the run options of a single fit: alone, or the last fit of a search, which fits the best map once more."""
    frame = _frame_of_search()
    with _lock:
        _end_those_that_broke_off()
        search = next((each for each in _searches if each.frame is frame), None)
    if search is None:
        yield ALONE
        return
    try:
        yield RunOptions(group=search.group, tags={"sparkdl.best_model": "true"})
    except BaseException:
        search.group.note_failure()
        raise
    finally:
        with _lock:
            if search in _searches:
                _searches.remove(search)
        search.group.close()


def _open(estimator: FittingEstimator[Any], name: str) -> RunGroup | None:
    params = estimator.params_of_fit()
    return open_group(
        cast("TrackingMode", params.getTracking()),
        lambda: UnsentRuns(params.getStore()),
        experiment=params.getExperiment(),
        name=name,
    )


def _frame_of_search() -> FrameType | None:
    from pyspark.ml.tuning import CrossValidator, TrainValidationSplit

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_fit" and isinstance(
            frame.f_locals.get("self"), CrossValidator | TrainValidationSplit
        ):
            return frame
        frame = frame.f_back
    return None


def _end_those_that_broke_off() -> None:
    """End the runs of searches whose ``_fit`` has ended without a last fit, because of an error there."""
    at_work: set[int] = set()
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            at_work.add(id(frame))
            frame = frame.f_back
    for search in [each for each in _searches if id(each.frame) not in at_work]:
        _searches.remove(search)
        search.group.note_failure()
        search.group.close()


@atexit.register
def _end_all() -> None:
    for search in _searches:
        search.group.note_failure()
        search.group.close()
