"""``Runner`` with ranks on this machine; tests/spark/launch/test_runner.py tests it on Spark."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path

import pytest

from sparkdl import distributed
from sparkdl.errors import (
    LaunchError,
    ParamError,
    ProcessesLostError,
    RankDiedError,
    RankError,
    SerializationError,
)
from sparkdl.horovod.torch import HorovodInternalError
from sparkdl.launch.task import supervisor
from tests.runner import rank_functions as functions
from tests.runner.local_runner import make_runner


def test_values_are_in_the_order_of_ranks_and_every_backend_is_ready_on_them(caplog):
    values = make_runner().run_all(functions.see_everything, 1, second=2)
    for rank, value in enumerate(values):
        assert value == {
            "given": (1, 2),
            "backend": "sparkdl",
            "sum": [2.0, 2.0],
            "horovod": (rank, 2),
            "communicator": (rank, 2),
            "variables": [str(rank), "2", str(rank), "2"],
        }
    assert not caplog.records


def test_a_function_may_initialize_torch_itself_and_finds_all_ranks_with_any_backend(caplog):
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        values = make_runner(init_torch=False).run_all(functions.initialize_torch_in_every_way)
    for rank, value in enumerate(values):
        assert value == [
            [str(rank), "2", str(rank), "2", "0", "0"],
            ["sparkdl", 2, [3.0, 3.0]],
            ["gloo", 2, [3.0, 3.0]],
            ["undefined", 2, [3.0, 3.0]],
        ]
    assert not caplog.records


def test_a_function_that_leaves_the_ranks_unconnected_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        assert make_runner(init_torch=False).run_all(functions.do_nothing) == [False, False]
        (record,) = caplog.records
        assert "its 2 ranks trained 2 unconnected models" in record.getMessage()
        make_runner(init_torch=False, num_workers=1).run(functions.do_nothing)
        make_runner(init_torch=False).run(functions.make_worlds_of_one_rank)
    assert ["its 2 ranks trained 2 unconnected" in record.getMessage() for record in caplog.records] == [
        True
    ] * 2


def test_accelerate_finds_the_ranks_with_and_without_init_torch():
    for init_torch, backend in ((True, "sparkdl"), (False, "gloo")):
        values = make_runner(init_torch=init_torch).run_all(functions.rank_in_accelerate)
        assert values == [[rank, 2, "gloo", backend] for rank in (0, 1)]


def test_function_may_have_keywords_of_any_name():
    names = {"num_ranks": 7, "transport": "x", "spark": 1, "train": 2, "self": 3, "function": 4, "context": 5}
    assert make_runner(num_workers=1).run(functions.keywords_of_the_launch, **names) == names


def test_a_failing_rank_is_named_with_its_exception():
    with pytest.raises(RankError, match="Rank 1 on .* failed.*LookupError: rank 1 looked in vain") as caught:
        make_runner(max_restarts=3).run(functions.fail_on, 1)
    assert (caught.value.rank, type(caught.value.__cause__)) == (1, LookupError)
    assert "fail_on" in caught.value.traceback_text


def test_error_with_the_undecodable_name_of_a_file_arrives_as_it_is():
    with pytest.raises(RankError, match="LookupError: no row in caf\\udce9.csv") as caught:
        make_runner().run(functions.look_in, "caf\udce9.csv")
    assert isinstance(caught.value.__cause__, LookupError)


def test_argument_that_cannot_be_pickled_is_named_as_the_user_passed_it():
    with pytest.raises(SerializationError, match="^argument 1 cannot be pickled"):
        make_runner().run(print, 1, threading.Lock())
    with pytest.raises(SerializationError, match="^lock cannot be pickled"):
        make_runner().run(print, lock=threading.Lock())


def test_value_that_the_driver_cannot_load_is_said_to_be_the_value_of_its_rank():
    with pytest.raises(
        SerializationError, match="^The value that rank 0 returned cannot be loaded on the driver: Mod"
    ):
        make_runner().run_all(functions.value_of_a_module_of_this_process)


def test_value_of_100_mib_is_returned_whole():
    num_bytes = (100 << 20) + 7
    assert len(make_runner(num_workers=1).run(functions.many_bytes, num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("how", "options", "said"),
    [
        ("die", {"max_restarts": 1}, "Rank 1 on .* 2 of 2 ranks from the beginning, .* restart 1 of 1"),
        ("hang", {"max_restarts": 1, "hang_timeout_s": 2.0}, "Rank 1 on .* hangs.* restart 1 of 1"),
        ("raise", {"max_retries": 1}, "LookupError: the first time.* retry 1 of 1"),
        (
            "cut",
            {"max_retries": 1, "transport": "tcp"},
            "connection between ranks was cut .* rank [01] on .* retry 1 of 1",
        ),
    ],
)
def test_run_continues_after_a_rank_died_hung_raised_or_lost_its_connections(
    tmp_path, caplog, how, options, said
):
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        assert make_runner(**options).run(functions.fail_once, tmp_path / "once", how) == "done"
    assert re.search(said, caplog.text)


@pytest.mark.parametrize(
    ("name", "culprit", "said", "causes"),
    [
        ("disagree", None, "MismatchError: the ranks disagree", []),
        ("disagree_under_horovod", None, "HorovodInternalError: Mismatched ALLREDUCE tensor shapes", []),
        ("return_early", 0, "rank 1 closed .* took part in barrier", []),
        ("raise_what_is_never_pickled", 1, "NeverPickledError: on rank 1", []),
        ("raise_without_a_message", 1, "WithoutMessageError: <exception str", []),
        ("clean_up_together_after_an_error", 1, "MismatchError: the ranks disagree", []),
        (
            "fail_in_what_horovod_runs",
            1,
            "HorovodInternalError: Horovod has been shut down",
            [HorovodInternalError, TypeError],
        ),
        ("fail_in_a_hook_of_torch", 1, "LookupError: in the hook", [LookupError]),
    ],
)
def test_failure_that_would_repeat_is_no_loss_and_runs_once(
    name, culprit, said, causes, tmp_path, monkeypatch
):
    monkeypatch.setattr(supervisor, "EXIT_GRACE_S", 1.0)
    with pytest.raises(RankError, match=said) as caught:
        make_runner(max_restarts=3).run(functions.note_attempt, str(tmp_path), name)
    assert not isinstance(caught.value, ProcessesLostError)
    if culprit is not None:
        assert caught.value.rank == culprit
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["0", "1"]
    error = caught.value
    for expected in causes:
        error = error.__cause__
        assert type(error) is expected


def test_log_lines_carry_their_rank_and_log_level():
    lines = []
    make_runner(log_level="info", on_log=lambda *line: lines.append(line)).run(functions.log_and_print)
    assert lines == [
        (0, "printed", None),
        (0, "WARNING of.mine: warned of", logging.WARNING),
        (0, "two lines", logging.WARNING),
        (0, "INFO of.mine: informed", logging.INFO),
        (0, "printed to standard error", None),
        (0, ("meant for the driver" + "!" * 5000)[:4000], None),
    ]


def test_without_a_log_level_warnings_are_shown_and_a_function_may_configure_logging(capfd):
    make_runner().run(functions.log_and_print)
    said = capfd.readouterr()
    assert said.err.splitlines() == [
        "[rank 0] printed",
        "[rank 0] WARNING of.mine: warned of",
        "[rank 0] two lines",
        "[rank 0] printed to standard error",
    ]
    assert said.out.startswith("[rank 0] meant for the driver!")
    make_runner(num_workers=1).run(functions.configure_logging)
    assert capfd.readouterr().err == "[rank 0] MINE informed\n"


def test_error_of_a_killed_rank_has_its_last_lines_without_marks():
    with pytest.raises(RankDiedError, match="SIGKILL") as caught:
        make_runner(num_workers=1, on_log=lambda *_: None).run(functions.print_last_words_and_die)
    assert caught.value.traceback_text == "WARNING of.mine: last words\n"


SCRIPT = """
import argparse, json, sys
import torch.distributed as dist
import beside

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--rate", type=float)
parser.add_argument("--sizes", type=int, nargs="*")
parser.add_argument("--fast", action="store_true")
parser.add_argument("--shift", type=int)
parser.add_argument("--out")
options = parser.parse_args()
if __name__ == "__main__" and dist.get_rank() == 1:
    with open(options.out, "w") as file:
        json.dump({**vars(options), "world": dist.get_world_size(), "beside": beside.VALUE}, file)
sys.exit(0 if options.rate < 1 else 3)
"""


def test_a_script_gets_its_arguments_and_its_exit_status_counts(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("VALUE = 4")
    out = tmp_path / "out.json"
    arguments = {"sizes": [3, 4], "fast": True, "shift": -2, "out": out, "unset": None, "off": False}
    assert make_runner().run(tmp_path / "train.py", "rows", rate=0.5, **arguments) is None
    assert out.read_text() == (
        '{"data": "rows", "rate": 0.5, "sizes": [3, 4], "fast": true, "shift": -2, '
        f'"out": "{out}", "world": 2, "beside": 4}}'
    )
    with pytest.raises(RankError, match="SystemExit: 3"):
        make_runner().run(str(tmp_path / "train.py"), "rows", rate=2, **arguments)
    with pytest.raises(ParamError, match="missing.py cannot be read: No such file"):
        make_runner().run("missing.py")
    with pytest.raises(ParamError, match=r"a file \*.py given by its path, not 'train.sh'"):
        make_runner().run("train.sh")


def test_second_init_process_group_and_returned_ddp_model_are_explained():
    with pytest.raises(RankError, match="already initialized on every rank.*Remove the call"):
        make_runner(num_workers=1).run(functions.initialize_again)
    with pytest.raises(RankError, match=r"returned a DistributedDataParallel.*Return its \.module"):
        make_runner(num_workers=1).run(functions.wrapped_model)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_workers": 0}, "num_workers must be at least 1, got 0"),
        ({"gpus_per_worker": -1}, "gpus_per_worker must be at least 0, got -1"),
        ({"monitor": {"seconds": 5}}, "give a sparkdl.monitor.Monitor"),
        ({"max_restarts": -1}, "max_restarts must be at least 0"),
        ({"max_retries": -1}, "max_retries must be at least 0"),
        ({"min_workers": 3}, "min_workers=3 must be between 1 and num_workers=2"),
        ({"log_level": "loud"}, "log_level='loud' is not a level of logging.*WARNING"),
        ({"transport": "pigeon"}, "'pigeon' is unknown"),
        ({"resources": object()}, "resources has no meaning with local=True"),
    ],
)
def test_invalid_options_are_refused_before_ranks_start(options, said):
    with pytest.raises(ParamError, match=said):
        make_runner(**options).run(functions.fail_on, 0)


def test_missing_spark_session_error_suggests_local_ranks():
    with pytest.raises(LaunchError, match="no active Spark session.*local=True"):
        make_runner(local=False).run(functions.fail_on, 0)


# The ranks of these tests need other forkservers than those before, and come last so that those are started once.


def test_ranks_share_an_mpi_world_whatever_the_transport():
    pytest.importorskip("mpi4py", reason="the extra mpi is not installed")
    assert make_runner(transport="tcp").run_all(functions.rank_in_mpi) == [(0, 3), (1, 3)]


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has a GPU")
def test_rank_that_sees_no_gpu_of_those_it_was_to_have_is_warned_of(capsys):
    assert make_runner(num_workers=1, gpus_per_worker=1).run(int, 7) == 7
    said = capsys.readouterr().err
    assert "[rank 0] WARNING sparkdl.runner.on_rank: " in said
    assert "Rank 0 was to have 1 GPU, " in said


def test_runner_passes_variables_modules_deadline_and_wire_to_the_ranks():
    plain = make_runner(transport="tcp").run(functions.look_around)
    assert plain == {"variable": None, "is_imported": False, "timeout_s": 300.0, "sum": 2 + 2**-11}
    runner = make_runner(
        transport="tcp",
        wire="bfloat16",
        environment={"OF_MINE": "yes"},
        modules=("wave",),
        operation_timeout_s=100.0,
    )
    assert runner.run(functions.look_around) == {
        "variable": "yes",
        "is_imported": True,
        "timeout_s": 100.0,
        "sum": 2.0,
    }


@distributed(num_workers=2, local=True)
def add_ranks(offset, *, factor=1):
    """Sum of the ranks."""
    import torch

    number = torch.tensor([float(torch.distributed.get_rank())])
    torch.distributed.all_reduce(number)
    return offset + factor * int(number)


def test_a_call_of_a_distributed_function_runs_on_ranks_and_returns_the_value_of_rank_0():
    assert add_ranks(10, factor=5) == 15
    assert (add_ranks.__name__, add_ranks.__doc__) == ("add_ranks", "Sum of the ranks.")
    with pytest.raises(ParamError, match=r"no setting 'num_worker'. Did you mean num_workers"):
        distributed(num_worker=2)
    with pytest.raises(ParamError, match=r"got train\. Write @distributed\(num_workers=4\)"):

        @distributed
        def train() -> None: ...
