"""Every transport reports the same hosts and local ranks."""

from __future__ import annotations

import pytest

from tests.collective.scenes import failure_scenes
from tests.run_ranks import run_ranks


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_ranks_of_one_machine_share_a_host_over_every_transport(transport: str) -> None:
    outcomes = run_ranks(3, failure_scenes.place, transport)
    assert [outcome["hosts"] for outcome in outcomes] == [(0, 0, 0)] * 3
    assert [outcome["local rank"] for outcome in outcomes] == [0, 1, 2]
    assert [outcome["local size"] for outcome in outcomes] == [3] * 3
    assert [outcome["requested"] for outcome in outcomes] == [transport] * 3
    assert [outcome["process set"] for outcome in outcomes] == [(transport, 3)] * 3
