from __future__ import annotations

from sparkdl.launch.wire.outcome import Failure


def test_failure_survives_json() -> None:
    failure = Failure(rank=2, host="a", error="LookupError: none", traceback="...", pickled=b"x")
    assert Failure.from_json(failure.to_json(), pickled=b"x") == failure
