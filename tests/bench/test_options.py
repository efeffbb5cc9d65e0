"""Options of the benchmarks that cannot work are refused before anything starts."""

from __future__ import annotations

from types import ModuleType

import pytest

from sparkdl.bench import allreduce, feed, fit, launch, parallel, step, transform
from sparkdl.errors import ParamError
from tests.bench.parsed import parsed


@pytest.mark.parametrize(
    ("benchmark", "arguments", "message"),
    [
        (allreduce, ("--ranks", "1"), "--ranks 1"),
        (allreduce, ("--seconds", "0"), "--seconds 0"),
        (allreduce, ("--queued", "100"), "--queued 100"),
        (allreduce, ("--buffers", "0"), "--buffers 0"),
        (allreduce, ("--json", "nowhere/report.json"), "nowhere/report.json cannot be written"),
        (feed, ("--against", "pandas"), "--against pandas is unknown"),
        (feed, ("--cases", "29 floats"), "--cases 29 floats is unknown"),
        (feed, ("--seconds", "0"), "use more than 0"),
        (feed, ("--scale", "0"), "use more than 0"),
        (feed, ("--json", "nowhere/x.json"), "there is no such folder"),
        (fit, ("--ranks", "0"), "--ranks 0"),
        (fit, ("--rounds", "0"), "--rounds 0"),
        (fit, ("--scale", "0.0001"), "leaves 100 rows"),
        (fit, ("--against", "gloo"), "--against gloo"),
        (fit, ("--json", "no/such/folder/file"), "no such folder"),
        (launch, ("--ranks", "2,0"), "--ranks 2,0 is not a list of numbers of ranks"),
        (parallel, ("--models", "7B"), "--models 7B is unknown"),
        (parallel, ("--batches", "4"), "--batches 4 is not rows x positions"),
        (parallel, ("--batches", "4x30"), "a number of positions that 4 divides"),
        (parallel, ("--kinds", "ZeRO"), "--kinds ZeRO is unknown"),
        (step, ("--models", "7B"), "--models 7B is unknown"),
        (step, ("--rows", "0"), "--rows 0"),
        (step, ("--models", ""), "--models"),
        (transform, ("--cases", "29 columns"), "--cases 29 columns is unknown"),
        (transform, ("--seconds", "0"), "use more than 0"),
        (transform, ("--slots", "0"), "--slots 0 is too few"),
        (transform, ("--json", "nowhere/x.json"), "there is no such folder"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, ModuleType) else " ".join(value),
)
def test_options_that_cannot_work_are_refused(
    benchmark: ModuleType, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ParamError, match=message):
        benchmark.run(parsed(benchmark, *arguments))
