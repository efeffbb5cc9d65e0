from __future__ import annotations

import re
import sqlite3
import subprocess
from pathlib import Path

import pytest

from tests.cli.sparkdl_command import sparkdl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
]  # most of it is the one run of the demo, on a busy machine


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory that is empty before the demo."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def done(home: Path) -> subprocess.CompletedProcess[str]:
    """The result of the demo, which runs once for all tests of this module."""
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    return sparkdl("demo", "--folder", "made-here", cwd=home, timeout_s=280)


def test_demo_recognizes_at_least_97_of_100_digits_by_spark_and_by_mlflow(
    done: subprocess.CompletedProcess[str],
) -> None:
    assert done.returncode == 0, done.stderr
    found = re.search(r"(0\.\d+) by Spark, (0\.\d+) by MLflow's model", done.stdout)
    assert found is not None, done.stdout
    assert all(float(accuracy) >= 0.97 for accuracy in found.groups())


def test_demo_prints_its_progress_and_no_other_lines(done: subprocess.CompletedProcess[str]) -> None:
    lines = done.stderr.splitlines()
    assert [line for line in lines if re.match(r"epoch 20/20  loss 0\.\d+  [\d,]+ rows/s", line)], lines
    assert lines[-2] == "Logging the model to MLflow"
    assert lines[-1].startswith("MLflow run ")
    # The JVM itself writes the last one; no option silences it.
    stages = ("Preparing ", "Writing ", "Starting 2 ranks", "epoch ", "Logging ", "MLflow run ")
    allowed = (*stages, "WARNING: Using incubator modules")
    assert [line for line in lines if not line.startswith(allowed)] == []


def test_demo_writes_only_to_its_folder_and_removes_the_training_rows(
    done: subprocess.CompletedProcess[str], home: Path
) -> None:
    assert done.returncode == 0, done.stderr
    folder = home / "made-here"
    assert [path.name for path in home.iterdir()] == ["made-here"]
    assert (folder / "model" / "metadata").is_dir()
    with sqlite3.connect(folder / "mlflow.db") as store:
        (location,) = store.execute(
            "SELECT artifact_location FROM experiments WHERE name = 'sparkdl demo'"
        ).fetchone()
    assert location == (folder / "mlflow-artifacts").as_uri()
    assert list(folder.glob("mlflow-artifacts/**/MLmodel"))
    assert list((folder / "store").iterdir()) == []  # the training rows are gone


def test_demo_ends_by_printing_the_saved_model_and_the_mlflow_ui_command(
    done: subprocess.CompletedProcess[str], home: Path
) -> None:
    folder = home / "made-here"
    made = done.stdout[done.stdout.index("What was made:") :]
    assert f"{folder / 'model'}\n" in made
    assert re.search(rf"models:/\S+ in sqlite:///{re.escape(str(folder))}/mlflow.db\n", made), made
    command = made.splitlines()[-1].strip()
    assert re.fullmatch(
        rf"\S+/mlflow ui --backend-store-uri sqlite:///{re.escape(str(folder))}/mlflow.db", command
    )
    assert Path(command.split()[0]).is_file()
