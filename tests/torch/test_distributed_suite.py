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
    # A recv names its sender here, as with NCCL.
    "test_send_recv_any_source",
    "test_send_recv_any_source_autograd_profiler",
    "test_send_recv_any_source_torch_profiler",
    # torch has deprecated all_gather_coalesced, which NCCL does not have.
    "test_all_gather_coalesced_complex",
    "test_all_gather_coalesced_full_group",
    "test_all_gather_coalesced_group",
    "test_all_gather_coalesced_simple",
    "test_all_gather_coalesced_with_empty",
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
