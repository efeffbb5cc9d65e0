"""Runs torch's own ``DistributedTest``, which the torch wheel ships, on a backend and reports how each test ended.

``python -m tests.torch.distributed_test sparkdl [NAME ...]`` writes one JSON object: for each test ``"passed"``, or why
it was skipped or failed. The suite only knows torch's backends, so it sees any other backend as Gloo except where a
process group is opened: it runs here all tests that it runs on Gloo. Ranks are forked, because starting a process
that imports torch takes longer than most of the tests.
"""

from __future__ import annotations

import json
import os
import sys
import time
import unittest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

WORLD_SIZE = 3

_BARRIER_TIMEOUT_S = 120.0
"""Timeout for ranks to meet before and after a test; the suite's own 10 s are too short on a busy machine."""

_TEST_TIMEOUT_S = 240
"""Timeout after which the suite kills the ranks of a test."""

_WITH_EVENTS = ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS")
"""Names of the suite's lists of backends whose collectives are events of torch's profiler."""


class _LikeGloo(str):
    """The name of a backend that equals "gloo" where the suite asks what a backend can do."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _import_suite(backend: str) -> ModuleType:
    # Read when the suite is imported, as its decorators compare the backend with those that they know.
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(WORLD_SIZE),
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(_TEST_TIMEOUT_S),
    )
    from torch.testing._internal.distributed import distributed_test

    if backend != "gloo":
        import sparkdl.torch  # noqa: F401  # registers the backend

        distributed_test.BACKEND = _LikeGloo(backend)
        for name in _WITH_EVENTS:
            getattr(distributed_test, name).append(backend)
        distributed_test.get_profiling_event = _without_threads(distributed_test.get_profiling_event)
    return distributed_test


def _without_threads(get_events: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Wrap the suite's search for events to skip its check of threads.

    The suite expects each event to end on another thread than it began, as Gloo's events do. sparkdl's events end when
    the call returns; their names, counts, durations and shapes are still checked.
    """

    def events(*arguments: Any, **options: Any) -> list[Any]:
        found = get_events(*arguments, **options)
        for event in found:
            event.is_async = True
        return found

    return events


def _suite_class(suite: ModuleType) -> type[unittest.TestCase]:
    import torch

    class TestDistributed(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def _barrier(self, *arguments: Any, **options: Any) -> None:
            super()._barrier(*arguments, **{"timeout": _BARRIER_TIMEOUT_S, **options})

    return TestDistributed


class _Outcomes(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.of_tests: dict[str, str] = {}
        self._begun_s = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._begun_s = time.monotonic()

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        name = test._testMethodName
        self.of_tests.setdefault(name, "passed")
        seconds = time.monotonic() - self._begun_s
        print(f"{seconds:6.1f} s {name}: {self.of_tests[name].splitlines()[0]}", file=sys.stderr, flush=True)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._note(test, f"skipped: {reason}")

    def addError(self, test: unittest.TestCase, error: Any) -> None:
        super().addError(test, error)
        self._note(test, f"failed:\n{self.errors[-1][1]}")

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:
        super().addFailure(test, error)
        self._note(test, f"failed:\n{self.failures[-1][1]}")

    def _note(self, test: unittest.TestCase, outcome: str) -> None:
        self.of_tests[test._testMethodName] = outcome


def _main(backend: str, names: list[str]) -> None:
    case = _suite_class(_import_suite(backend))
    names = names or unittest.TestLoader().getTestCaseNames(case)  # type: ignore[assignment]
    outcomes = _Outcomes()
    unittest.TestSuite(map(case, names)).run(outcomes)
    print(json.dumps(outcomes.of_tests))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
