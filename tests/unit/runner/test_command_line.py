from __future__ import annotations

import argparse

from hypothesis import given
from hypothesis import strategies as st

from sparkdl.runner.script import command_line

NAMES = st.from_regex(r"[a-z][a-z_]{0,6}", fullmatch=True).filter(lambda name: name != "help")
WORDS = st.text(min_size=1).filter(lambda word: "\x00" not in word)
VALUES = st.one_of(WORDS, st.integers(), st.floats(allow_nan=False))


@given(st.dictionaries(NAMES, VALUES))
def test_every_value_of_a_keyword_is_what_a_parser_reads(options):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, value in options.items():
        parser.add_argument(f"--{name}", type=type(value))
    assert vars(parser.parse_args(command_line((), options))) == options


def test_flags_lists_and_what_is_unset_are_spelled_as_parsers_expect_them():
    words = command_line(
        ("data", 3), {"fast": True, "slow": False, "none": None, "sizes": [1, 2], "one": ["x"]}
    )
    assert words == ["data", "3", "--fast", "--sizes", "1", "2", "--one", "x"]
