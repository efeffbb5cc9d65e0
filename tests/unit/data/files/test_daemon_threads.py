from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from sparkdl.data.files.threads import DaemonThreads

STORE_THAT_NEVER_ANSWERS = """
import threading
import fsspec
from sparkdl.data import Column, ParquetDataset, ParquetFeed, RowFilter
from sparkdl.data.dataset.dataset import RowGroup
from sparkdl.errors import DataError

class Silent(fsspec.get_filesystem_class("memory")):
    protocol = "silent"
    cachable = False

    def open(self, path, mode="rb", **options):
        threading.Event().wait()

fsspec.register_implementation("silent", Silent)
groups = tuple(RowGroup(path="a.parquet", index=index, num_rows=5) for index in range(3))
dataset = ParquetDataset(url="silent://a", columns=(Column(name="id", dtype="int64"),), row_groups=groups)
row_filter = RowFilter(["id"], lambda values: values["id"] > 0)
for options in ({"row_filter": row_filter}, {}):
    try:
        list(ParquetFeed(dataset, batch_size=5, shuffle=False, read_timeout_s=0.2, **options))
    except DataError as error:
        print(error)
"""


def test_process_ends_although_reads_and_counts_of_a_store_hang() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", STORE_THAT_NEVER_ANSWERS],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    told = "Reading silent://a/a.parquet, row group 0 took longer than 0.2 s."
    assert [line[: len(told)] for line in finished.stdout.splitlines()] == [told, told]


def test_calls_begin_in_their_order_and_give_results_and_errors() -> None:
    threads, called = DaemonThreads(1, "test"), []
    futures = [threads.submit(called.append, number) for number in range(50)]
    failing = threads.submit(int, "no number")
    assert [future.result(10) for future in futures] == [None] * 50
    assert called == list(range(50))
    with pytest.raises(ValueError, match="no number"):
        failing.result(10)
    threads.stop()


def test_stopping_completes_the_running_call_and_cancels_all_others() -> None:
    threads, begun, released = DaemonThreads(1, "test"), threading.Event(), threading.Event()

    def call() -> bool:
        begun.set()
        return released.wait(10)

    futures = [threads.submit(call) for _ in range(3)]
    assert begun.wait(10)
    threads.stop()
    assert [future.cancelled() for future in [*futures, threads.submit(call)]] == [False, True, True, True]
    released.set()
    assert futures[0].result(10)
    with pytest.raises(CancelledError):
        futures[1].result(0)


def test_threads_that_were_never_stopped_end_when_they_are_collected() -> None:
    threads = DaemonThreads(2, "forgotten")
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("forgotten")]
    assert len(mine) == 2
    del threads
    gc.collect()
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive()


def test_interpreter_waits_for_a_running_call_even_of_collected_threads() -> None:
    """A thread that returns from C++ after Python has been finalized would abort the process."""
    program = (
        "import gc, threading, time\n"
        "from sparkdl.data.files.threads import DaemonThreads\n"
        "threads, begun = DaemonThreads(1, 'test'), threading.Event()\n"
        "def call():\n"
        "    begun.set()\n"
        "    time.sleep(0.3)\n"
        "    print('ended')\n"
        "threads.submit(call)\n"
        "begun.wait()\n"
        "del threads\n"
        "gc.collect()\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=False
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "ended\n", "")
