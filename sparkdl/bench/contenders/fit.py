"""The contenders of ``sparkdl bench fit``. Each takes the cached frame, and returns the trained weights and its times.

Runs on the *driver*; each contender starts its ranks itself. Each has the fastest settings that train the same model:
ranks have one thread, and all contenders but sparkdl shuffle at most row groups, not rows.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.bench.contenders.fit_task import (
    FEATURES,
    LABEL,
    WIDTH,
    FitSize,
    Fitted,
    make_model,
    make_optimizer,
    weights_of,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NUM_READERS = 2
_GROUPS_OF_PARTITION = 8


def fit_with_sparkdl(size: FitSize, frame: DataFrame, folder: Path) -> Fitted:
    """Fit with sparkdl's ``TorchEstimator``, untracked, in a Store without the rows of an earlier fit."""
    import torch
    from pyspark.sql import functions as F

    from sparkdl.bench.contenders.fit_clock import FitClock
    from sparkdl.estimators import TorchEstimator

    stamps = folder / "stamps.json"
    estimator = TorchEstimator(
        model=make_model(),
        optimizer=make_optimizer,
        loss=torch.nn.MSELoss(),
        featuresCol="features",
        labelCol=LABEL,
        batchSize=size.batch_size,
        epochs=size.epochs,
        numWorkers=size.num_ranks,
        callbacks=[FitClock(str(stamps), str(folder / "store"))],
        store=str(folder / "store"),
        tracking="off",
        showProgress=False,
    )
    started = time.time()
    fitted = estimator.fit(frame.select(F.array(*FEATURES).alias("features"), LABEL))
    ended = time.time()
    return Fitted(
        started=started,
        ended=ended,
        weights=weights_of(fitted.module),
        parts={
            part: statistics.fmean(vars(rank)[part] for rank in fitted.summary.rank_seconds)
            for part in ("computing", "communicating", "reading")
        },
        **json.loads(stamps.read_text()),
    )


def fit_with_horovod(size: FitSize, frame: DataFrame, folder: Path) -> Fitted:
    """Fit with Horovod's ``TorchEstimator``.

    The estimator does not report when training begins and ends, so the time after it has written the rows counts as
    training.
    """
    import torch
    from pyspark.sql import functions as F

    from sparkdl.bench.contenders.fit_clock import newest_parquet
    from sparkdl.data.petastorm.containment import install

    install()
    # The ranks are processes of Horovod, and have to install the compatibility layer before they import Petastorm.
    (folder / "sitecustomize.py").write_text(f"from {install.__module__} import install\ninstall()\n")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    common, model = "horovod.spark.common", make_model()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    estimator = import_module("horovod.spark.torch").TorchEstimator(
        backend=import_module(f"{common}.backend").SparkBackend(num_proc=size.num_ranks, env=environment),
        store=import_module(f"{common}.store").LocalStore(str(folder)),
        model=model,
        optimizer=make_optimizer(model.parameters()),
        loss=lambda outputs, labels: torch.nn.functional.mse_loss(outputs.squeeze(1), labels.reshape(-1)),
        input_shapes=[[-1, WIDTH]],
        feature_cols=["features"],
        label_cols=[LABEL],
        batch_size=size.batch_size,
        epochs=size.epochs,
        verbose=0,
    )
    started = time.time()
    fitted = estimator.fit(frame.select(F.array(*FEATURES).alias("features"), LABEL))
    ended = time.time()
    written = newest_parquet(folder)
    return Fitted(
        started=started,
        written=written,
        training=written,
        trained=ended,
        ended=ended,
        weights=weights_of(fitted.getModel()),
    )


def fit_with_distributor(size: FitSize, frame: DataFrame, folder: Path, *, local_mode: bool) -> Fitted:
    """Fit with pyspark's ``TorchDistributor``: ranks run in a barrier stage or, in local mode, beside the driver."""
    from pyspark.ml.torch.distributor import TorchDistributor

    url = (folder / "rows").as_uri()
    started = time.time()
    # Row groups of equal size, as Petastorm has to give every rank the same number of rows.
    rows_of_group = -(-size.num_rows // (size.num_ranks * _GROUPS_OF_PARTITION))
    writer = frame.write.option("compression", "uncompressed").option("parquet.enable.dictionary", "false")
    writer.option("parquet.block.row.count.limit", rows_of_group).parquet(url)
    written = time.time()
    distributor = TorchDistributor(num_processes=size.num_ranks, local_mode=local_mode, use_gpu=False)
    results: Any = distributor.run(_train_on_petastorm, asdict(size), url)
    return Fitted(started=started, written=written, ended=time.time(), **results)


CONTENDERS: dict[str, Callable[[FitSize, Any, Path], Fitted]] = {
    "sparkdl": fit_with_sparkdl,
    "distributor": partial(fit_with_distributor, local_mode=False),
    "distributor-local": partial(fit_with_distributor, local_mode=True),
    "horovod": fit_with_horovod,
}


def _train_on_petastorm(settings: dict[str, Any], url: str) -> dict[str, Any]:
    """Train on a rank of the distributor: DistributedDataParallel on Gloo, with batches from Petastorm."""
    # Gloo is faster with several connections at once; it reads the variable when the process group is made.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo,lo,lo,lo"
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from sparkdl.data.petastorm.containment import install

    install()
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader

    size = FitSize(**settings)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optimizer = make_optimizer(model.parameters())
    reader = make_batch_reader(
        url,
        num_epochs=size.epochs,
        workers_count=NUM_READERS,
        cur_shard=dist.get_rank(),
        shard_count=dist.get_world_size(),
    )
    steps = size.epochs * size.num_rows // (size.num_ranks * size.batch_size)
    with BatchedDataLoader(reader, batch_size=size.batch_size) as loader:
        training = time.time()
        for batch in islice(loader, steps):
            optimizer.zero_grad()
            features = torch.stack([batch[name] for name in FEATURES], dim=1)
            torch.nn.functional.mse_loss(model(features).squeeze(1), batch[LABEL]).backward()
            optimizer.step()
        trained = time.time()
    dist.destroy_process_group()
    return {"training": training, "trained": trained, "weights": weights_of(model.module)}
