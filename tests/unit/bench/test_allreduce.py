"""The benchmark end to end, with buffers so small that it takes seconds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from sparkdl.bench import allreduce
from sparkdl.bench.starting import Task, run_task
from sparkdl.errors import ParamError, RankError


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    allreduce.add_arguments(parser)
    return parser.parse_args(arguments)


def test_run_measures_every_contender_in_ranks_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    options = ["--sizes", "1KiB,64KiB", "--seconds", "0.01", "--against", "gloo,mpi", "--json", str(path)]
    assert allreduce.run(parse(*options)) == 0
    rows = json.loads(path.read_text())["rows"]
    measured = {(row["contender"], row["bytes"]) for row in rows}
    contenders = ("copy", "native", "torch", "gloo", "gloo tuned", "mpi")
    assert measured == {(contender, size) for contender in contenders for size in (1024, 65536)}
    assert all(0 < row["median_s"] <= row["p90_s"] for row in rows)
    assert "native is" in capsys.readouterr().out


def test_one_rank_is_refused() -> None:
    with pytest.raises(ParamError, match="--ranks 1"):
        allreduce.run(parse("--ranks", "1"))


def test_rank_that_fails_is_named_with_its_last_words() -> None:
    task = Task(contender="nobody", world_size=2, sizes=[1024], seconds=0.01)
    with pytest.raises(RankError, match=r"rank 0 .* 'nobody'"):
        run_task(task, timeout_s=60.0)
