from __future__ import annotations

from sparkdl.runner.on_rank import join_visible_gpus


def test_gpus_of_a_host_are_joined_only_where_each_rank_has_its_own():
    assert join_visible_gpus(["3", "1", "2"]) == "3,1,2"
    assert join_visible_gpus(["GPU-a", "GPU-b"]) == "GPU-a,GPU-b"
    assert join_visible_gpus(["0"]) == "0"
    assert join_visible_gpus(["", ""]) is None
    assert join_visible_gpus(["0", ""]) is None
    assert join_visible_gpus(["0", "0"]) is None
    assert join_visible_gpus(["0,1", "2,3"]) is None
