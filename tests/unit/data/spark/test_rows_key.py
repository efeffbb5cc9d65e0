"""Reading the plans of one session in several threads."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from sparkdl.data.spark.rows_key import plan_text

SETTING = "spark.sql.debug.maxToStringFields"


class Session:
    """A session's settings, and the DataFrames whose plans it prints."""

    def __init__(self) -> None:
        self.settings = {SETTING: "25"}
        self.num_reads = 0
        self.second_read = threading.Event()
        self.conf = SimpleNamespace(
            get=self.get, set=self.settings.__setitem__, unset=self.settings.__delitem__
        )

    def get(self, name: str, default: str | None) -> str | None:
        self.num_reads += 1
        if self.num_reads == 2:
            self.second_read.set()
        return self.settings.get(name, default)

    def frame(self, explain: Any) -> Any:
        return SimpleNamespace(sparkSession=self, _explain_string=explain)


def test_a_session_keeps_its_setting_when_two_threads_read_plans() -> None:
    session = Session()
    seen: list[str] = []

    def explain(mode: str) -> str:
        assert mode == "extended"
        seen.append(session.settings[SETTING])
        return ""

    second = threading.Thread(target=plan_text, args=(session.frame(explain),))

    def explain_meanwhile(mode: str) -> str:
        second.start()
        # Without a lock the second thread would take the value set by the first one for the user's setting.
        assert not session.second_read.wait(0.2), "the setting was read while it was not the user's"
        return explain(mode)

    plan_text(session.frame(explain_meanwhile))
    second.join()
    assert seen == [str(1 << 20)] * 2
    assert session.settings == {SETTING: "25"}
