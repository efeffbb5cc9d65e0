from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sparkdl.runner.script import Script, command_line


def test_source_of_a_script_is_in_a_folder_that_spark_removes(tmp_path, monkeypatch):
    local, unseen = tmp_path / "local", tmp_path / "unseen"
    local.mkdir()
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = Script(
        path=str(tmp_path / "elsewhere" / "train.py"),
        source=b"import pathlib, sys\npathlib.Path(sys.argv[1]).write_text(__file__)\n",
        arguments=(str(tmp_path / "place"),),
    )
    for folders in (f"{local}", f"{unseen},{local}"):
        monkeypatch.setenv("SPARK_LOCAL_DIRS", folders)
        on_rank = replace(script)
        on_rank()
        place = (tmp_path / "place").read_text()
        assert place.startswith(f"{local}/sparkdl-script-")
        on_rank()
        assert (tmp_path / "place").read_text() == place
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(unseen))
    replace(script)()
    assert not (tmp_path / "place").read_text().startswith(str(tmp_path))


NAMES = st.from_regex(r"[a-z][a-z_]{0,6}", fullmatch=True).filter(lambda name: name != "help")
WORDS = st.text(min_size=1).filter(lambda word: "\x00" not in word)
VALUES = st.one_of(WORDS, st.integers(), st.floats(allow_nan=False))


@given(st.dictionaries(NAMES, VALUES))
def test_parser_reads_the_values_of_keywords(options):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, value in options.items():
        parser.add_argument(f"--{name}", type=type(value))
    assert vars(parser.parse_args(command_line((), options))) == options


def test_flags_lists_and_unset_values_of_a_command_line():
    words = command_line(
        ("data", 3), {"fast": True, "slow": False, "none": None, "sizes": [1, 2], "one": ["x"]}
    )
    assert words == ["data", "3", "--fast", "--sizes", "1", "2", "--one", "x"]
