"""``horovod.run`` with its import changed; tests/spark/launch/test_horovod_entries.py tests ``horovod.spark``."""

from __future__ import annotations

import re

import pytest

from sparkdl import horovod
from sparkdl.errors import ParamError
from tests.runner import horovod_examples as examples
from tests.runner.local_runner import keep_environment


def test_horovod_run_returns_the_value_of_each_rank(capfd):
    keep_environment()
    assert horovod.run(examples.fn, args=(42,), np=2, hosts="localhost:2", use_gloo=True) == [
        (0, 2, None),
        (1, 2, None),
    ]
    assert "[rank 1] Hello, rank = 1, size = 2, magic_number = 42" in capfd.readouterr().err
    horovod.run(examples.fn, kwargs={"magic_number": 1}, prefix_output_with_timestamp=True)
    assert re.search(
        r"^\w{3} \w{3} \d\d [\d:]{8} \d{4}\[0\]<stdout>:Hello, rank = 0, ", capfd.readouterr().out
    )


def test_horovod_run_with_bounds_continues_without_a_lost_rank(tmp_path):
    keep_environment()
    marker = tmp_path / "killed"
    values = horovod.run(examples.train_elastically, (str(marker),), num_proc=2, min_num_proc=1)
    assert marker.exists()
    assert values[0] == values[-1]
    sizes, _ = values[0]
    assert sizes[:4] == [2, 2, 2, 1]
    assert len(sizes) >= 12  # an epoch that was committed and interrupted is repeated, as it is written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": "localhost:1,other:2"}, "does not take hosts='localhost:1,other:2'. .*horovod.spark.run"),
        ({"hostfile": "hosts", "ssh_port": 22}, "does not take hostfile='hosts', ssh_port=22"),
        ({"mpi_args": "--x"}, "no mpirun"),
        ({"executable": "python2"}, "Python of this process"),
        ({"reset_limit": 3}, "max_restarts"),
        ({"use_gloo": True, "use_mpi": True}, "cannot both be True"),
        ({"num_proc": 2, "slots": 1}, "slots=1 are too few for num_proc=2"),
        (
            {"num_proc": 2, "min_num_proc": 3},
            "num_proc=2 has to be between min_num_proc=3 and max_num_proc=2",
        ),
        ({"num_proc": 2, "max_np": 1}, "between min_num_proc=2 and max_num_proc=1"),
    ],
)
def test_arguments_without_a_meaning_here_are_refused_with_what_to_do(arguments, message):
    with pytest.raises(ParamError, match=message):
        horovod.run(examples.fn, (1,), **arguments)
