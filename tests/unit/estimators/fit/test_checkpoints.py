from __future__ import annotations

from sparkdl.estimators.fit.checkpoints import run_key_of


def test_run_of_checkpoints_is_that_of_their_fit_as_long_as_there_are_any(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    url = str(tmp_path / "checkpoints")
    first = run_key_of(url)
    assert run_key_of(url) != first, "a fit without checkpoints starts from the beginning"
    second = run_key_of(url)
    checkpoint = tmp_path / "checkpoints" / "fit-00000001-epoch-00001-step-00000005-0123abcd"
    checkpoint.mkdir()
    assert run_key_of(url) == run_key_of(url) == second
    (tmp_path / "checkpoints" / "mlflow_run.json").write_text("{")
    assert run_key_of(url) not in (first, second)
    checkpoint.rmdir()
    third = run_key_of(url)
    assert run_key_of(url) != third
