"""What MLflow is told of the Params of a fit. Runs on the *driver*."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkdl.data import ParquetDataset
    from sparkdl.estimators.params import _TorchEstimatorParams


def params_to_log(params: _TorchEstimatorParams, parquet: ParquetDataset) -> dict[str, object]:
    """Return Params by name, objects by what they are called, and the sizes of model and rows."""
    functions = [params.optimizer, params.loss, *params.function_params()]
    objects = [params.model, params.metrics, params.callbacks, *functions]
    plain = {param.name: value for param, value in params.extractParamMap().items() if param not in objects}
    names = {
        "metrics": ", ".join(params.getMetrics()),
        "callbacks": ", ".join(_name_of(each) for each in params.getCallbacks()),
        **{param.name: _name_of(params.getOrDefault(param)) for param in functions if params.isSet(param)},
    }
    model = params.getModel()
    return {
        **plain,
        **params.further_params(),
        **{name: value for name, value in names.items() if value},
        "model": type(model).__name__,
        "numParameters": sum(parameter.numel() for parameter in model.parameters()),
        "numRows": parquet.num_rows,
    }


def _name_of(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_name_of, value))
    return str(getattr(value, "__name__", type(value).__name__))
