"""What a job writes into ``result.json``. Runs on the *driver*."""

from __future__ import annotations

import platform
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from sparkdl import __version__
from sparkdl.jobs.output import MODEL

if TYPE_CHECKING:
    from sparkdl.estimators import TorchModel
    from sparkdl.jobs.identity import Identity
    from sparkdl.jobs.job import Job

_LIBRARIES = ("torch", "pyspark", "mlflow", "numpy")


def make_result(job: Job, identity: Identity, model: TorchModel, *, began: datetime) -> dict[str, Any]:
    """Return what is known of a job that is done, as JSON holds it.

    Args:
        job: the job.
        identity: by which an equal one is recognized.
        model: that it trained.
        began: when.
    """
    summary = model.summary
    ended = datetime.now(timezone.utc)
    last = summary.history[-1]
    return {
        "job": {"hash": identity.digest, **asdict(identity)},
        "file": job.file.name,
        "model": MODEL,
        "model_class": f"{type(model).__module__}.{type(model).__qualname__}",
        "began": began.isoformat(timespec="seconds"),
        "ended": ended.isoformat(timespec="seconds"),
        "seconds": round((ended - began).total_seconds(), 3),
        "ranks": len(last.rank_seconds),
        "epochs": len(summary.history),
        "model_epoch": summary.model_epoch,
        "loss": last.loss,
        "metrics": dict(last.metrics),
        "history": [asdict(record) for record in summary.history],
        "run_id": summary.run_id,
        "model_uri": summary.model_uri,
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    found = {"sparkdl": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass  # mlflow need not be there
    return found
