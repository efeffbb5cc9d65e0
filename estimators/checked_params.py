"""Has wrong names, types and Param maps answered with errors that name the Param. Runs on the *driver*."""

from __future__ import annotations

import difflib
import inspect
import reprlib
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pyspark.ml.param import Param, Params, TypeConverters

from sparkdl.errors import ParamError, ParamTypeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

P = TypeVar("P", bound="CheckedParams")

_TAKES: dict[Any, str] = {
    TypeConverters.toInt: "a whole number",
    TypeConverters.toFloat: "a number",
    TypeConverters.toString: "a string",
    TypeConverters.toBoolean: "True or False",
    TypeConverters.toListString: "a list of strings",
}


_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "weightCol": ("classweight", "sampleweight", "rowweight", "weight", "weightcolumn"),
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
"""What other libraries call a Param, in lower case and without underscores and a final s."""


class CheckedParams(Params):
    """Base of everything here that has Params: errors say which Param, which value, and what it takes.

    None stands for a Param that is not set: who sets it takes back what was set before.
    """

    def __new__(cls: type[P], *args: Any, **kwargs: Any) -> P:  # noqa: ARG004 - as it is called with
        """Make an instance, with an error for arguments that the constructor does not take."""
        accepted = inspect.signature(cls.__init__).parameters
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values()):
            for name in kwargs:
                if name not in accepted and not isinstance(getattr(cls, name, None), Param):
                    raise ParamTypeError(_unknown(cls, name, [each for each in accepted if each != "self"]))
        return super().__new__(cls)

    _input_kwargs: dict[str, Any]
    """What the constructor was given; pyspark's ``keyword_only`` puts it there."""

    def _set_arguments(self) -> None:
        """Set what the constructor was given, and let go of it: a model that is replaced later is not kept."""
        self.setParams(**self.__dict__.pop("_input_kwargs"))

    def setParams(self: P, **params: Any) -> P:
        """Set Params by name, as the constructor does; None leaves a Param as it is.

        Raises:
            ParamError: if there is no Param of a name, or its value is of a type that it does not take.
        """
        return self._set(**{name: value for name, value in params.items() if value is not None})

    def set(self, param: Param[Any], value: Any) -> None:
        """Set a Param of this instance; see :meth:`setParams`."""
        self._shouldOwn(param)
        self._set(**{param.name: value})

    def _set(self: P, **params: Any) -> P:
        for name, given in params.items():
            if not self.hasParam(name):
                raise self._unknown(name)
            param = self.getParam(name)
            if given is None:
                self.clear(param)
                continue
            value = given.item() if isinstance(given, np.generic) else given
            try:
                super()._set(**{name: value})
            except (TypeError, ValueError) as error:
                raise _wrong_type(param, given, error) from error
        return self

    def _unknown(self, name: str) -> ParamError:
        return ParamError(_unknown(type(self), name, [param.name for param in self.params]))


def _unknown(cls: type, name: str, names: Sequence[str]) -> str:
    plain = name.lower().replace("_", "").removesuffix("s")
    near = [known for known in names if plain in _OTHER_NAMES.get(known, ())]
    near = near or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"The Params are: {', '.join(names)}."
    return f"{cls.__name__} has no Param {name!r}. {hint}"


def check_param_map(instance: Params, param_map: Mapping[Any, Any]) -> None:
    """Check that a Param map speaks of Params of an instance, as an entry for another one would have no effect.

    Raises:
        ParamTypeError: if a key is no Param.
        ParamError: if one belongs to something else.
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
    # Spark puts words of its own before those of the converter.
    cause = error.__context__ or error
    return ParamTypeError(f"Param {param.name} cannot be {reprlib.repr(value)}: {cause}.")
