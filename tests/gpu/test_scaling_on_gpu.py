"""``sparkdl bench scaling --device cuda`` end to end, on two GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkdl.bench import scaling
from tests.bench.parsed import parsed
from tests.gpu.gpu_scenes import needs_two_gpus

pytestmark = pytest.mark.gpu


@needs_two_gpus
@pytest.mark.timeout(300)
def test_replicas_and_shards_are_measured_on_gpus(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    options = ("--device", "cuda", "--model", "gpt", "--strategies", "data,shard", "--modes", "strong")
    few = ("--against", "", "--seconds", "0.1", "--rounds", "1", "--json", str(path))
    assert scaling.run(parsed(scaling, *options, *few)) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["contender"] for row in rows] == ["one rank", "alone", "data", "shard"]
    assert all(row["memory_bytes"] > 300 << 20 for row in rows[:3])
