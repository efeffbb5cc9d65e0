from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparkdl.launch.wire.messages import FOR_DRIVER, mark_lines, split_mark


@given(st.one_of(st.integers(0, 100), st.just(FOR_DRIVER)), st.text())
def test_every_line_of_a_marked_text_has_the_mark_and_is_otherwise_the_same(mark, text):
    lines = [split_mark(line) for line in mark_lines(mark, text).split("\n")]
    assert {found for found, _ in lines} == {str(mark)}
    assert [line for _, line in lines] == (text.splitlines() or [""])


@given(st.text(st.characters(exclude_characters="\x1e")))
def test_what_has_no_mark_stays_as_it_is(line):
    assert split_mark(line) == (None, line)
