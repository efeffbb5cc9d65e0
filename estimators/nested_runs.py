"""Runs of MLflow for several fits that belong together, nested under one. Runs on the *driver*.

Fits belong together that one call of ``fit(df, maps)`` or ``fitMultiple`` makes, or one search of ``CrossValidator`` or
``TrainValidationSplit``: these call ``fitMultiple`` once per fold, then ``fit`` for the best map, and say nothing of
themselves. So the search is found among the callers, as the object whose ``_fit`` is at work.
"""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from sparkdl.estimators.place_of_fit import ALONE, PlaceOfFit
from sparkdl.estimators.unsent_runs import UnsentRuns
from sparkdl.tracking import RunGroup, TrackingMode, open_group

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from sparkdl.estimators.fitting_estimator import FittingEstimator


class NestedRuns:
    """The runs of several Param maps, on one fold of a search or without one.

    Args:
        group: of the runs.
        fold: number from 0 of the fold; None without a search. The group then ends with this object.
    """

    def __init__(self, group: RunGroup, fold: int | None) -> None:
        self._group, self._fold = group, fold
        if fold is None:
            weakref.finalize(self, group.close)

    def place(self, index: int) -> PlaceOfFit:
        """Return the place of the fit of a Param map, by its index."""
        tags = {"sparkdl.param_map": str(index)}
        if self._fold is not None:
            tags["sparkdl.fold"] = str(self._fold)
        return PlaceOfFit(group=self._group, tags=tags)

    def end_as_failed(self) -> None:
        """End the run above them, as a fit has failed and with it what it was part of."""
        with _lock:
            _searches[:] = [each for each in _searches if each.group is not self._group]
        self._group.note_failure()
        self._group.close()


class _Search:
    """A search at work: its frame, which tells it from others, and the group of its runs.

    The frame holds its DataFrames and models, so a search is forgotten when a fit of it fails, with its last fit, or
    where it broke off otherwise (in its evaluator, say) at the beginning of the next fit.
    """

    def __init__(self, frame: FrameType, group: RunGroup) -> None:
        self.frame, self.group, self.num_folds = frame, group, 0


_searches: list[_Search] = []
_lock = threading.Lock()


def nested_runs(estimators: Sequence[FittingEstimator[Any]]) -> NestedRuns | None:
    """Return the runs for the fits of several Param maps; None where they are not tracked, or there is one alone.

    Args:
        estimators: one for each map.
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
def place_of_single_fit() -> Iterator[PlaceOfFit]:
    """Give the place of a fit on its own: alone, or the last one of a search, which fits the best map once more."""
    frame = _frame_of_search()
    with _lock:
        _end_those_that_broke_off()
        search = next((each for each in _searches if each.frame is frame), None)
    if search is None:
        yield ALONE
        return
    try:
        yield PlaceOfFit(group=search.group, tags={"sparkdl.best_model": "true"})
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
    """End the runs of searches that have left their ``_fit`` without a last fit: something failed there."""
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
