"""``sparkdl demo``: the whole way once, on this machine: digits, two ranks, a Spark model, MLflow.

Trains on handwritten digits, tracks the fit in MLflow, loads the logged model back and scores it.

It starts a local Spark session, fits a small convolutional network on two ranks, and leaves what it made in a folder.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.errors import SparkdlError

if TYPE_CHECKING:
    import torch
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.estimators import TorchModel

NUM_CLASSES = 10
SIDE = 8
REQUIRED_ACCURACY = 0.97


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--ranks", type=int, default=2, help="how many ranks train (default: 2)")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the data (default: 12)")
    parser.add_argument(
        "--folder", type=Path, default=Path("demo"), help="where results go (default: ./demo)"
    )


def run(options: argparse.Namespace) -> int:
    """Train, score, save, load back from MLflow and score again; the status is 1 if the accuracy is too low."""
    _require_libraries()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tracking = os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
    started = time.monotonic()
    spark = _start_spark(options.ranks)
    try:
        train, test = _digits(spark)
        model = _fit(train, options, folder)
        accuracy = _accuracy(model.transform(test))
        model.write().overwrite().save(str(folder / "model"))
        served = _accuracy_of_logged_model(model.summary.model_uri, test)
    finally:
        spark.stop()
    print(
        f"\nAccuracy on {SIDE}x{SIDE} digits that were not trained on: {accuracy:.4f} by Spark,"
        f" {served:.4f} by the model loaded back from MLflow.\n"
        f"Took {time.monotonic() - started:.0f} s. What was made:\n"
        f"  {folder / 'model'}  the Spark ML model; TorchModel.load reads it\n"
        f"  {model.summary.model_uri}  the same model in MLflow, with the run's params and metrics\n"
        f"See the run:  {Path(sys.executable).parent / 'mlflow'} ui --backend-store-uri {tracking}"
    )
    return 0 if min(accuracy, served) >= REQUIRED_ACCURACY else 1


def digits_cnn() -> torch.nn.Module:
    """A small convolutional network from rows of 64 pixels to 10 class scores."""
    import torch

    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, SIDE, SIDE)),
        torch.nn.Conv2d(1, 32, kernel_size=3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, kernel_size=3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * (SIDE // 2) ** 2, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, NUM_CLASSES),
    )


def _require_libraries() -> None:
    missing = [name for name in ("mlflow", "petastorm", "pyspark", "sklearn", "torch") if not find_spec(name)]
    if missing:
        raise SparkdlError(
            f"The demo needs {', '.join(missing)}; install them with: pip install 'sparkdl[all]'"
        )


def _start_spark(num_ranks: int) -> SparkSession:
    import pyspark
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_HOME", str(Path(pyspark.__file__).parent))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    session: SparkSession = (
        SparkSession.builder.master(f"local[{num_ranks}]")
        .appName("sparkdl demo")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")  # would overwrite the line of the fit
        .config("spark.log.level", "ERROR")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    return session


def _digits(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    """scikit-learn's 1,797 handwritten digits, bundled with it, as pixels from 0 to 1; a fifth is kept for the test."""
    from pyspark.sql.types import ArrayType, FloatType, LongType, StructField, StructType
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, digits = load_digits(return_X_y=True)
    schema = StructType([StructField("image", ArrayType(FloatType())), StructField("digit", LongType())])
    parts = train_test_split(images / 16, digits, test_size=0.2, random_state=0, stratify=digits)
    train, test = (
        spark.createDataFrame(list(zip(rows.tolist(), labels.tolist(), strict=True)), schema)
        for rows, labels in ((parts[0], parts[2]), (parts[1], parts[3]))
    )
    return train, test


def _fit(train: DataFrame, options: argparse.Namespace, folder: Path) -> TorchModel:
    import torch

    from sparkdl.estimators import TorchEstimator

    estimator = TorchEstimator(
        model=digits_cnn(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        loss=torch.nn.CrossEntropyLoss(),
        featuresCol="image",
        labelCol="digit",
        batchSize=32,
        epochs=options.epochs,
        numWorkers=options.ranks,
        seed=7,
        store=str(folder / "store"),
        experiment="sparkdl demo",
    )
    print(f"Fitting {train.count()} images of handwritten digits on {options.ranks} ranks.", flush=True)
    return estimator.fit(train)


def _accuracy(scored: DataFrame) -> float:
    from pyspark.sql import functions as F

    (row,) = scored.select(F.avg((F.col("digit") == F.col("prediction")).cast("double"))).collect()
    return float(row[0])


def _accuracy_of_logged_model(uri: str | None, test: DataFrame) -> float:
    """Score as a serving process would: no Spark, one pandas frame."""
    import mlflow

    assert uri is not None, "the demo always tracks"
    frame: Any = test.toPandas()
    predicted = mlflow.pyfunc.load_model(uri).predict(frame[["image"]])
    return float((predicted["prediction"].to_numpy() == frame["digit"].to_numpy()).mean())
