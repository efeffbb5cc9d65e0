"""The base of all classes with Params, converters of values, and checks of Params that hold functions.

Errors about wrong names, types and Param maps name the Param. For a class or an instance where a function is expected,
the error says what to pass instead.
"""

from __future__ import annotations

import inspect
import re
import reprlib
from abc import ABCMeta
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from pyspark.ml.param import Param, Params, TypeConverters
from torch import nn
from torch.optim import Optimizer

from sparkdl.errors import ParamError, ParamTypeError, did_you_mean
from sparkdl.estimators.params.by_name import optimizer_by_name
from sparkdl.estimators.params.table import default_values, params_of

if TYPE_CHECKING:
    from collections.abc import Mapping


P = TypeVar("P", bound="CheckedParams")


# pyspark's converters for lists and arrays. Their types here let setters take any sequence.
to_numbers: Callable[[Any], Sequence[float]] = TypeConverters.toListFloat
to_integers: Callable[[Any], Sequence[int]] = TypeConverters.toListInt
to_strings: Callable[[Any], Sequence[str]] = TypeConverters.toListString

_TAKES: dict[Any, str] = {
    TypeConverters.toInt: "a whole number",
    TypeConverters.toFloat: "a number",
    TypeConverters.toString: "a string",
    TypeConverters.toBoolean: "True or False",
    to_strings: "a list of strings",
    to_numbers: "a list of numbers",
    to_integers: "a list of whole numbers",
}
"""Descriptions of the accepted values, by converter; used in error messages about values of another type."""

_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "classWeights": ("classweight", "weightsbyclas", "balanceclasse"),
    "sampling": ("sampler", "oversampling", "oversample"),
    "weightCol": ("sampleweight", "rowweight", "weight", "weightcolumn"),
    "learningRate": ("lr", "stepsize", "rate"),
    "optimizer": ("optim", "lr", "learningrate", "stepsize"),
    "loss": ("criterion", "lossfn", "lossfunction", "objective"),
    "epochs": ("maxiter", "numepoch", "nepoch", "maxepoch"),
    "batchSize": ("batch", "minibatch", "blocksize"),
    "numWorkers": ("np", "nproc", "worker", "numrank", "rank", "numproc", "numprocesse", "worldsize"),
    "gpusPerWorker": ("gpu", "usegpu", "device", "numgpu"),
    "featuresCol": ("x", "inputcol", "feature", "featurecol"),
    "labelCol": ("y", "targetcol", "target", "label"),
    "validationFraction": ("validationsplit", "valfraction", "validation", "valsplit"),
    "earlyStoppingPatience": ("earlystopping", "patience"),
    "showProgress": ("verbose", "progress", "progressbar"),
    "checkpointDir": ("checkpoint", "checkpointpath", "checkpointfolder"),
    "maxGradNorm": ("clipnorm", "gradientclipval", "gradclip"),
}
"""Names that other libraries use for a Param, in lower case, without underscores and without a final s."""


class _ShortHelp(ABCMeta):
    """The class of classes with Params, whose ``help`` shows what their constructor takes and what they do.

    ``dir`` of such a class leaves out Params, their getters and setters, what pyspark documents for all Params, and
    private names. ``dir`` of an instance, which completion uses, has them all.
    """

    def __dir__(cls) -> list[str]:
        shown = [name for name in super().__dir__() if not name.startswith("_") and not hasattr(Params, name)]
        return [
            "explainParam",
            *(
                name
                for name in shown
                if not _ACCESSOR.match(name) and not isinstance(inspect.getattr_static(cls, name), Param)
            ),
        ]


_ACCESSOR = re.compile("(get|set)[A-Z](?!arams$)|read$|write$")


class CheckedParams(Params, metaclass=_ShortHelp):
    """Base of all classes with Params; errors name the Param, its value, and the values that it accepts.

    Setters clear a Param if they get None.
    """

    _own_defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of a class that differ from those of the table, by the names of the Params."""

    _input_kwargs: dict[str, Any]
    """Arguments of the constructor; pyspark's ``keyword_only`` stores them here."""

    def _copy_params(self) -> None:
        """Give the instance its own Params, as pyspark does for those that ``dir`` of the class has."""
        for param in params_of(type(self)):
            setattr(self, param.name, param._copy_new_parent(self))

    def _set_arguments(self) -> None:
        """Set the constructor's arguments, and drop the references to them, so that a replaced model is not kept."""
        self._setDefault(**default_values(type(self)))
        self.setParams(**self.__dict__.pop("_input_kwargs"))

    def setParams(self: P, **params: Any) -> P:
        """Set Params by name, as the constructor does; an argument that is None leaves its Param unchanged.

        Raises:
            ParamTypeError: if there is no Param of that name, or the Param does not accept values of that type.
        """
        self._check_names(params)
        return self._set(**{name: value for name, value in params.items() if value is not None})

    def explainParam(self, param: str | Param[Any]) -> str:
        """Return the name, the documentation, the default and the value of a Param."""
        entry, text = self._resolveParam(param), str(super().explainParam(param))
        head, more = f"{entry.name}: {entry.doc}", getattr(entry, "more", "")
        return f"{head}. {more}{text.removeprefix(head)}" if more else text

    def set(self, param: Param[Any], value: Any) -> None:
        """Set a Param of this instance; see :meth:`setParams`."""
        self._shouldOwn(param)
        self._set(**{param.name: value})

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if not self.hasParam(name):
                raise ParamTypeError(
                    _unknown_name_error(type(self), name, [param.name for param in self.params])
                )

    def _set(self: P, **params: Any) -> P:
        self._check_names(params)
        for name, raw in params.items():
            param = self.getParam(name)
            if raw is None:
                self.clear(param)
                continue
            value = raw.item() if isinstance(raw, np.generic) else raw
            try:
                super()._set(**{name: value})
            except (TypeError, ValueError) as error:
                raise _wrong_type(param, raw, error) from error
        return self


def _unknown_name_error(cls: type, name: str, names: Sequence[str]) -> str:
    plain = name.lower().replace("_", "").removesuffix("s")
    near = [known for known in names if plain in _OTHER_NAMES.get(known, ())]
    others = f"The Params are: {', '.join(names)}."
    hint = f"Did you mean {' or '.join(near)}?" if near else did_you_mean(name, names, otherwise=others)
    return f"{cls.__name__} has no Param {name!r}. {hint}"


def check_param_map(instance: Params, param_map: Mapping[Any, Any]) -> None:
    """Check that all Params in a Param map belong to an instance; an entry for another instance has no effect.

    Raises:
        ParamTypeError: if a key is not a Param.
        ParamError: if a Param belongs to another instance.
    """
    for param in param_map:
        if not isinstance(param, Param):
            raise ParamTypeError(
                f"The keys of a Param map are Params, such as estimator.{instance.params[0].name}; got {param!r}."
            )
        if not instance._testOwnParam(param.parent, param.name):
            raise ParamError(
                f"The Param map sets {param.name} of {param.parent}, and this is {instance.uid}: that would have no "
                f"effect. Take the Param from this estimator (or a pipeline that holds {param.parent})."
            )


def _wrong_type(param: Param[Any], value: Any, error: Exception) -> ParamTypeError:
    takes = _TAKES.get(param.typeConverter)
    if takes is not None:
        return ParamTypeError(f"Param {param.name} takes {takes}, got {reprlib.repr(value)}: {param.doc}.")
    # Spark puts its own text before the message of the converter.
    cause = str(error.__context__ or error).removesuffix(".")
    end = "" if str(cause).endswith((".", "?")) else "."
    return ParamTypeError(f"Param {param.name} cannot be {reprlib.repr(value)}: {cause}{end}")


ParamsT = TypeVar("ParamsT", bound=Params)


class OneOf:
    """Type converter for one of several strings; raises TypeError for any other value."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def __call__(self, value: Any) -> str:
        """Return the value if it is one of the choices."""
        if value not in self.choices:
            raise TypeError(f"{value!r} is none of {', '.join(map(repr, self.choices))}")
        return str(value)


def check_callable(param: Param[Any], value: object) -> None:
    """Check that the value of a Param is callable and is not a class.

    Raises:
        ParamError: if it is not; the message names the Param, describes its value, and says what the Param accepts.
    """
    if isinstance(value, type):
        name = _name(value)
        if issubclass(value, nn.Module):
            raise ParamError(f"Param {param.name} is the class {value.__name__}; give an instance: {name}().")
        raise ParamError(f"Param {param.name} is the class {value.__name__}: {param.doc}.")
    if not callable(value):
        raise ParamError(f"Param {param.name} is {type(value).__name__}: {param.doc}.")


def check_optimizer(param: Param[Any], value: object) -> None:
    """Check a function that takes a model's parameters and returns an optimizer, or the name of an optimizer.

    An optimizer class is such a function.

    Raises:
        ParamError: if there is no optimizer of that name, or the value is something else; for an optimizer instance,
            the message gives a function that makes it.
    """
    if isinstance(value, type) and issubclass(value, Optimizer):
        return  # makes an optimizer with its default options; if it cannot, the trial before the fit refuses it
    if isinstance(value, Optimizer):
        rate = value.defaults.get("lr")
        options = f", lr={float(rate):g}" if rate is not None else ""
        raise ParamError(
            f"Param {param.name} is an instance of {type(value).__name__}, and each rank makes its own, for its copy "
            f"of the model. Give a function: lambda parameters: {_name(type(value))}(parameters{options})."
        )
    if isinstance(value, str):
        optimizer_by_name(value, None)
    else:
        check_callable(param, value)


def _name(kind: type) -> str:
    """Return the name of a class as users most likely write it."""
    if kind.__module__.startswith("torch.nn."):
        return f"nn.{kind.__name__}"
    if kind.__module__.startswith("torch.optim."):
        return f"torch.optim.{kind.__name__}"
    return kind.__name__
