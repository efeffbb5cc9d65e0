"""``sparkdl bench allreduce`` end to end, with buffers so small that it takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkdl.bench import allreduce
from tests.bench.parsed import parsed

OURS = ("copy", "native", "arena", "torch")


@pytest.mark.parametrize(
    ("num_ranks", "against", "theirs"),
    [
        (2, "mpi", ("mpi",)),
        pytest.param(2, "impi", (), marks=pytest.mark.slow),
        pytest.param(4, "gloo,mpi", ("gloo", "gloo tuned", "mpi"), marks=pytest.mark.slow),
    ],
)
def test_run_measures_every_contender_at_every_case(
    num_ranks: int, against: str, theirs: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    options = ["--sizes", "1KiB,64KiB", "--queued", "3x2KiB", "--seconds", "0.01", "--json", str(path)]
    options += ["--against", against, "--buffers", "3"]
    assert allreduce.run(parsed(allreduce, *options, "--ranks", str(num_ranks))) == 0
    report = json.loads(path.read_text())
    measured = {(row["contender"], row["case"]) for row in report["rows"]}
    cases = ("allreduce 1KiB", "allreduce 64KiB", "3 allreduces of 2KiB, queued")
    optional = {"horovod", "intel mpi"} if "impi" in against else {"horovod"}
    contenders = {*OURS, *theirs, *(optional - set(report["missing"]))}
    assert measured == {(contender, case) for contender in contenders for case in cases}
    assert {row["ranks"] for row in report["rows"]} == {num_ranks}
    assert {row["buffers"] for row in report["rows"]} == {3}
    assert all(0 < row["median_s"] <= row["p90_s"] for row in report["rows"])
    assert all(row["repetitions"] >= 10 for row in report["rows"])
    assert "native is" in capsys.readouterr().out
