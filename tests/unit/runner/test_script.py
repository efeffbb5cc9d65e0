from __future__ import annotations

import sys

from sparkdl.runner.script import Script


def test_the_source_of_a_script_lies_where_spark_removes_it_even_if_the_rank_is_killed(tmp_path, monkeypatch):
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
        script.run()
        assert (tmp_path / "place").read_text().startswith(f"{local}/sparkdl-script-")
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(unseen))
    script.run()
    assert not (tmp_path / "place").read_text().startswith(str(tmp_path))
