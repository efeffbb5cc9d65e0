"""Jobs submitted to a standalone cluster by spark-submit, compared with the same jobs on this machine."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from sparkdl.estimators import TorchModel
from sparkdl.jobs.identity import ROWS
from tests.processes import with_descendants
from tests.standalone.cluster import StandaloneCluster
from tests.standalone.submitting import (
    SCRIPT,
    assert_gone,
    command,
    rank_pids,
    run,
    started,
    submit_command,
    train_command,
    wait_for_files,
    write_job,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def result_of(folder: Path) -> dict:
    return json.loads((folder / "out" / "result.json").read_text())


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "out" / "model" / "module" / "weights.safetensors")


def assert_equal_weights(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name])


@pytest.fixture(scope="module")
def undisturbed(rows, tmp_path_factory) -> Path:
    """The folder of a job that ``sparkdl train`` has run on this machine."""
    folder = tmp_path_factory.mktemp("laptop")
    done = run(train_command(write_job(folder, rows)), folder)
    assert done.code == 0, done.said
    assert "Done: 5 epochs, loss " in done.said
    return folder


def test_submitted_job_equals_sparkdl_train_to_the_bit(cluster, rows, undisturbed, tmp_path):
    job = write_job(tmp_path, rows)
    done = run(submit_command(cluster, [SCRIPT, job]), tmp_path)
    assert done.code == 0, done.said
    assert_equal_weights(weights_of(tmp_path), weights_of(undisturbed))
    here, there = result_of(tmp_path), result_of(undisturbed)
    assert (here["loss"], here["metrics"], here["ranks"]) == (there["loss"], there["metrics"], 2)
    assert here["job"][ROWS] == there["job"][ROWS]
    assert TorchModel.load(str(tmp_path / "out" / "model")).getEpochs() == 5
    # The ranks ran in the executors of both workers.
    assert len(list(cluster.folder.glob("worker-*/*/*/stderr"))) >= 2

    again = run(submit_command(cluster, [SCRIPT, job]), tmp_path)
    assert again.code == 0, again.said
    assert "Already done at " in again.said
    assert result_of(tmp_path) == here

    other = run(submit_command(cluster, [SCRIPT, job, "epochs=6"]), tmp_path)
    assert other.code == 2
    assert "another job: params.epochs was 5 and is 6" in other.said


def test_rows_are_predicted_by_the_command_and_by_a_submitted_job_alike(cluster, rows, undisturbed, tmp_path):
    section = f"predict:\n  parquet: {rows}\n  model: {undisturbed / 'out'}\n  output: {tmp_path}/scored\n"
    job = write_job(tmp_path, rows)
    job.write_text(job.read_text() + section)
    here = run(command("predict", job), tmp_path)
    assert here.code == 0, here.said
    assert f"Done: {tmp_path}/scored has the predictions." in here.said
    there = run(
        submit_command(cluster, [SCRIPT, "--predict", job, f"predict.output={tmp_path}/there"]), tmp_path
    )
    assert there.code == 0, there.said
    scored, submitted = (pq.read_table(tmp_path / name).to_pylist() for name in ("scored", "there"))
    assert len(scored) == len(submitted) == pq.read_table(rows).num_rows
    by_features = [sorted(table, key=lambda row: row["image"]) for table in (scored, submitted)]
    np.testing.assert_allclose(*([row["prediction"] for row in table] for table in by_features), rtol=1e-6)

    twice = run(command("predict", job), tmp_path)
    assert twice.code == 2
    assert "scored of the predictions exists" in twice.said


def test_the_plan_of_a_submitted_job_is_printed_and_nothing_is_trained(cluster, rows, tmp_path):
    done = run(
        submit_command(cluster, [SCRIPT, write_job(tmp_path, rows), "--dry-run", "batchSize=10"]), tmp_path
    )
    assert done.code == 0, done.said
    lines = {line[:8].rstrip(): line[9:] for line in done.said.splitlines()}
    assert lines["rows"] == f"203 of parquet {rows}; 162 for training, 41 for validation"
    assert lines["columns"].startswith("image, digit, is_test: ")
    assert lines["shards"] == "81 rows per rank and epoch"
    assert lines["steps"] == "9 per epoch; 45 in 5 epochs"
    assert lines["model"].startswith("131 parameters: weights 524 B, gradients 524 B, optimizer 524 B")
    assert "2 ranks (0, 1) on " in lines["host"]
    assert lines["output"] == f"{tmp_path / 'out'} is empty"
    assert {path.name for path in tmp_path.iterdir()} <= {"job", "spark-warehouse"}  # Spark makes the latter


def test_spark_submit_ends_with_the_code_of_the_job(cluster, rows, tmp_path):
    job = write_job(tmp_path, rows)
    wrong = run(submit_command(cluster, [SCRIPT, job, "epohcs=3"]), tmp_path)
    assert wrong.code == 2
    assert "params.epohcs: TorchEstimator has no Param 'epohcs'" in wrong.said

    loss = f"loss={{import: my_nets:FailingLoss, arguments: {{folder: {tmp_path}}}}}"
    failed = run(submit_command(cluster, [SCRIPT, job, loss]), tmp_path)
    assert failed.code == 1
    assert "sparkdl: Rank " in failed.said
    assert "ValueError: no such loss" in failed.said

    lacking = run(submit_command(cluster, [SCRIPT, job, "numWorkers=3"]), tmp_path)
    assert lacking.code == 75
    assert "the cluster has 2" in lacking.said
    assert not (tmp_path / "out").exists()


def test_job_ended_by_sigterm_resumes_from_its_checkpoints_on_a_cluster(cluster, rows, undisturbed, tmp_path):
    job = write_job(tmp_path, rows)
    (tmp_path / "hold").touch()
    with started(train_command(job), tmp_path) as process:
        wait_for_files(process, tmp_path / "held-0", tmp_path / "held-1")
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=500)
    assert process.returncode == 143, said
    assert "Done" not in said
    assert not (tmp_path / "out").exists()
    assert_gone(rank_pids(tmp_path))

    (tmp_path / "hold").unlink()
    done = run(submit_command(cluster, [SCRIPT, job, "showProgress=true"]), tmp_path)
    assert done.code == 0, done.said
    assert "continuing from a checkpoint: epoch 3/5" in done.said
    assert_equal_weights(weights_of(tmp_path), weights_of(undisturbed))


def test_ctrl_c_ends_a_job_and_its_ranks_with_status_130(rows, tmp_path):
    (tmp_path / "hold").touch()
    with started(train_command(write_job(tmp_path, rows)), tmp_path) as process:
        wait_for_files(process, tmp_path / "held-0", tmp_path / "held-1")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=500)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert_gone(rank_pids(tmp_path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)], ids=str
)
def test_signal_to_spark_submit_ends_its_program_and_the_ranks(cluster, rows, tmp_path, number, code):
    (tmp_path / "hold").touch()
    with started(submit_command(cluster, [SCRIPT, write_job(tmp_path, rows)]), tmp_path) as process:
        wait_for_files(process, tmp_path / "held-0", tmp_path / "held-1")
        program = with_descendants(process.pid) - {process.pid}
        process.send_signal(number)
        process.communicate(timeout=500)
    assert process.returncode == code
    assert_gone([*program, *rank_pids(tmp_path)])
    assert not (tmp_path / "out").exists()


def test_a_job_whose_cluster_is_lost_may_be_tried_again(rows, tmp_path):
    (tmp_path / "hold").touch()
    job = write_job(tmp_path, rows)
    with (
        StandaloneCluster(tmp_path / "cluster") as cluster,
        started(submit_command(cluster, [SCRIPT, job]), tmp_path) as process,
    ):
        wait_for_files(process, tmp_path / "held-0", tmp_path / "held-1")
        cluster.stop()
        said, _ = process.communicate(timeout=500)
    assert process.returncode == 75, said
    assert_gone(rank_pids(tmp_path))
    assert not (tmp_path / "out").exists()


def test_a_master_that_does_not_answer_may_be_tried_again(cluster, rows, tmp_path):
    command = submit_command(cluster, [SCRIPT, write_job(tmp_path, rows)])
    command[command.index(cluster.url)] = "spark://127.0.0.1:1"
    done = run(command, tmp_path)
    assert done.code == 75, done.said
    assert "sparkdl: The master that spark-submit was given " in done.said
