"""What constructors of all ready-made estimators take, beside what each has of its own. Runs on the *driver*."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ForwardRef, TypedDict, TypeVar, cast

from sparkdl.estimators.torch_estimator import TorchEstimator

if TYPE_CHECKING:
    from sparkdl.data import Store
    from sparkdl.training.callbacks import Callback
    from sparkdl.training.learning_rate import SchedulerFactory
    from sparkdl.training.metrics import Metric

T = TypeVar("T", bound=type)


class SharedArguments(TypedDict, total=False):
    """Params that mean what they mean in a :class:`TorchEstimator`; None leaves one as it is."""

    predictionCol: str | None
    weightCol: str | None
    validationIndicatorCol: str | None
    validationFraction: float | None
    metrics: Mapping[str, Metric] | None
    earlyStoppingPatience: int | None
    earlyStoppingMinDelta: float | None
    bestMetric: str | None
    bestMode: str | None
    callbacks: Sequence[Callback] | None
    scheduler: SchedulerFactory | None
    schedulerInterval: str | None
    learningRateScaling: str | None
    warmupSteps: int | None
    gradientAccumulationSteps: int | None
    maxGradNorm: float | None
    precision: str | None
    syncBatchNorm: bool | None
    compileModel: bool | None
    deterministic: bool | None
    numWorkers: int | None
    gpusPerWorker: int | None
    shuffle: bool | None
    cache: str | None
    store: Store | str | None
    keepRowsSeconds: float | None
    checkpointDir: str | None
    checkpointEverySteps: int | None
    keepCheckpoints: int | None
    maxRestarts: int | None
    minWorkers: int | None
    hangTimeoutSeconds: float | None
    transport: str | None
    wire: str | None
    tracking: str | None
    experiment: str | None
    runName: str | None
    trackingTimeoutSeconds: float | None
    registeredModelName: str | None
    registeredModelAlias: str | None
    logCheckpoints: bool | None
    showProgress: bool | None
    predictionBatchSize: int | None


def with_shared_arguments(made: T, **differing: str) -> T:
    """Have ``help()`` of a class with a constructor of ``(..., **shared)`` name each of them, as TorchEstimator does.

    Its docstring has to end with the arguments of its own.

    Args:
        made: the class.
        differing: by name what is said of arguments whose defaults are others than those of TorchEstimator.
    """
    entries = {**_documented(TorchEstimator), **differing}
    documentation = inspect.getdoc(made) or ""
    shared = [f"    {name}: {entries[name]}" for name in SharedArguments.__annotations__]
    made.__doc__ = "\n".join([documentation.rstrip(), *shared, ""])
    constructor: Any = made.__init__  # type: ignore[misc]  # of a class, not of an instance
    signature = inspect.signature(constructor)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation.__forward_arg__
        )
        for name, annotation in cast("dict[str, ForwardRef]", SharedArguments.__annotations__).items()
    ]
    constructor.__signature__ = signature.replace(parameters=[*own, *added])
    return made


def _documented(made: type) -> dict[str, str]:
    text = inspect.getdoc(made) or ""
    arguments = text[text.index("Args:") :]
    found: list[tuple[str, str]] = re.findall(
        r"^    (\w+): (.*(?:\n     .*)*)", arguments, flags=re.MULTILINE
    )
    return dict(found)
