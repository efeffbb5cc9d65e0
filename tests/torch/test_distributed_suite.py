"""torch's own ``DistributedTest`` on the backend; see :mod:`tests.torch.distributed_test`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.launchers import ROOT, environment

OF_GLOO_ALONE = {
    # monitored_barrier is a method of Gloo's process group only.
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_monitored_barrier_gloo_subgroup",
    # Expects the text of Gloo's error; sparkdl's error names the missing ranks.
    "test_barrier_timeout_full_group",
}
"""Tests that pass on Gloo with three ranks, but not on sparkdl."""


@pytest.mark.timeout(1200)
@pytest.mark.slow  # 285 tests; some 90 need neither a GPU nor another world size
def test_backend_passes_the_tests_of_torch_that_gloo_passes_except_those_about_gloo() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.torch.distributed_test", "sparkdl"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    failed = {name: outcome for name, outcome in outcomes.items() if outcome.startswith("failed")}
    assert failed.keys() == OF_GLOO_ALONE, {name: failed[name] for name in failed.keys() - OF_GLOO_ALONE}
    assert list(outcomes.values()).count("passed") > 80
