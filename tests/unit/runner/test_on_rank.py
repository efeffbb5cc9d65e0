from __future__ import annotations

from sparkdl.runner.on_rank import joined


def test_gpus_of_a_host_are_joined_only_where_each_rank_has_its_own():
    assert joined(["3", "1", "2"]) == "3,1,2"
    assert joined(["GPU-a", "GPU-b"]) == "GPU-a,GPU-b"
    assert joined(["0"]) == "0"
    assert joined(["", ""]) is None
    assert joined(["0", ""]) is None
    assert joined(["0", "0"]) is None
    assert joined(["0,1", "2,3"]) is None
