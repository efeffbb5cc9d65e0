"""``HorovodRunner`` in the cases that Databricks documents; tests/spark/launch/test_runner.py tests it on a cluster."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from sparkdl import HorovodRunner
from sparkdl.errors import HangError, LaunchError, ParamError, SerializationError
from sparkdl.horovod import log_to_driver
from sparkdl.runner import horovod_runner
from tests.runner import horovod_notebook as notebook
from tests.runner import rank_functions as functions
from tests.runner.local_runner import keep_environment


def runner_of(num_ranks):
    """Make a HorovodRunner whose ranks are processes of this machine."""
    keep_environment()
    return HorovodRunner(np=-num_ranks)


def test_the_documented_training_runs_on_the_driver_and_returns_rank_0s_value(tmp_path):
    losses = runner_of(2).run(notebook.train_hvd, learning_rate=0.1, log_dir=str(tmp_path))
    assert losses[-1] < losses[0] / 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"checkpoint-{epoch}.pth.tar" for epoch in (1, 2, 3)
    ]
    saved = torch.load(tmp_path / "checkpoint-3.pth.tar", weights_only=True)
    notebook.Net().load_state_dict(saved["model"])


def test_negative_np_starts_that_many_local_processes_and_prints_their_output(capfd):
    pid, *place = runner_of(1).run(notebook.where_am_i)
    assert pid != os.getpid()
    assert place == [0, 1, 1, "none"]
    assert runner_of(2).run(main=notebook.where_am_i, word="given")[1:] == (0, 2, 2, "given")
    # What both print within half a second is shown once.
    said = capfd.readouterr().err.replace(
        "[ranks 0, 1] said given", "[rank 0] said given\n[rank 1] said given"
    )
    assert sorted(said.splitlines()) == [
        "[rank 0] said given",
        "[rank 0] said none",
        "[rank 1] said given",
    ]


def test_ranks_wait_for_each_other_as_long_as_under_horovod():
    assert runner_of(1).run(notebook.how_long_ranks_wait) == 24 * 60 * 60


def test_stopped_process_is_a_hang_although_waits_have_no_limit(monkeypatch):
    monkeypatch.setattr(horovod_runner, "SILENCE_TIMEOUT_S", 2.0)
    with pytest.raises(HangError, match="is stopped, as by SIGSTOP") as caught:
        runner_of(1).run(functions.stop_itself)
    assert caught.value.rank == 0


def test_unsupported_arguments_are_explained():
    with pytest.raises(SerializationError, match="^lock cannot be pickled"):
        HorovodRunner(np=-2).run(notebook.where_am_i, lock=threading.Lock())
    with pytest.raises(TypeError, match="positional"):
        HorovodRunner(2)
    with pytest.raises(ParamError, match="np=0, which once meant all slots"):
        HorovodRunner(np=0).run(notebook.where_am_i)
    with pytest.raises(ParamError, match="driver_log_verbosity='most' is unknown; .* all, log_callback_only"):
        HorovodRunner(np=-1, driver_log_verbosity="most").run(notebook.where_am_i)
    with pytest.raises(ParamError, match=r"takes a function, and main is 'train.py'"):
        HorovodRunner(np=-1).run("train.py")
    with pytest.raises(LaunchError, match="no active Spark session.* np=-4"):
        HorovodRunner(np=4).run(notebook.where_am_i)


def test_log_to_driver_prints_to_stdout_outside_of_a_run(capsys):
    log_to_driver("x" * 5000)
    assert capsys.readouterr().out == "x" * 4000 + "\n"
