"""What some ranks are long waited for is warned of."""

from __future__ import annotations

import logging

import pytest

from sparkdl.horovod.torch.engine.stalls import StallWatch


def test_only_what_stays_missing_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    watch = StallWatch("world", warn_after_s=0.0)
    with caplog.at_level(logging.WARNING):
        watch.note({"allreduce.a": [1, 2]})
    assert "allreduce.a has waited for ranks [1, 2]" in caplog.text
    caplog.clear()
    for patient in (StallWatch("world", warn_after_s=60.0), StallWatch("world", warn_after_s=None)):
        with caplog.at_level(logging.WARNING):
            patient.note({"allreduce.a": [1]})
            patient.note({})
        assert not caplog.text
