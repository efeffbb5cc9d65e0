from __future__ import annotations

import threading

import pytest

from sparkdl.collective.watch import Watch

TIMEOUT_S = 30.0


@pytest.fixture
def looks():
    return threading.Semaphore(0)


def test_it_looks_once_when_woken_and_again_while_there_is_work(looks) -> None:
    work = [True, True, False]

    def look() -> bool:
        has_work = work.pop(0)
        looks.release()
        return has_work

    watch = Watch(look, name="watch", pause_s=0.001)
    assert not looks.acquire(timeout=0.1)  # nobody has woken it
    watch.wake()
    for _ in range(3):
        assert looks.acquire(timeout=TIMEOUT_S)
    assert not looks.acquire(timeout=0.1)
    watch.close()
    watch.close()


@pytest.mark.parametrize(
    "moment", ["before it clears the news", "after it has cleared the news", "in a look"]
)
def test_it_ends_whenever_it_is_closed(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(lambda: close_at("in a look"), name="watch", pause_s=0.001)
    closing = threading.Thread(target=watch.close, daemon=True)
    news, clear = watch._has_news, watch._has_news.clear

    def close_at(now: str) -> bool:
        if now == moment:
            closing.start()
            assert watch._is_closed.wait(TIMEOUT_S)
            assert news.wait(TIMEOUT_S) or moment == "in a look"
        return False

    def clear_news() -> None:
        close_at("before it clears the news")
        clear()
        close_at("after it has cleared the news")

    monkeypatch.setattr(news, "clear", clear_news)
    watch.wake()
    assert watch._is_closed.wait(TIMEOUT_S)
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()


def test_a_look_that_fails_is_logged_and_the_next_one_is_made(
    looks, caplog: pytest.LogCaptureFixture
) -> None:
    def look() -> bool:
        looks.release()
        raise RuntimeError("no more threads")

    watch = Watch(look, name="watch", pause_s=0.001)
    for _ in range(2):
        watch.wake()
        assert looks.acquire(timeout=TIMEOUT_S)
    watch.close()
    assert [record.message for record in caplog.records] == ["A look of the thread watch failed."] * 2
