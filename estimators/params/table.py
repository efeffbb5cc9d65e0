"""The entries of the table of Params, and what is derived from them.

An entry is one statement in the body of a class of Params::

    epochs, getEpochs, setEpochs = param(
        TypeConverters.toInt, "number of passes over the training rows", default=1, check=at_least(1), field="epochs"
    )

It defines the pyspark Param, its getter and setter, its default, the check of its value before a fit, its line in the
documentation of every estimator that has it, and the field of the :class:`~sparkdl.training.spec.TrainingSpec` that
gets its value. Two things stay beside it: the argument's type in ``SharedArguments``, which type checkers read before
the code runs (a test names a missing line), and the field, which belongs to the ranks.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

from pyspark.ml.param import Param, Params, TypeConverters

from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from typing_extensions import Self

V = TypeVar("V")
P = TypeVar("P", bound=Params)
T = TypeVar("T", bound=type)

Check: TypeAlias = Callable[[Param[Any], Any], None]
"""Called with a Param and its value before a fit; raises ParamError if the value cannot work."""

_WIDTH = 116


class AsGiven(Generic[V]):
    """Placeholder for the converter in the entry of a Param that holds an object, which is not converted."""

    def __call__(self, value: Any) -> V:
        """Return the value."""
        return cast("V", value)


class Entry(Param[V]):
    """A Param with its default, check and documentation; its name is the name of the class attribute.

    Args:
        kind: converter of values, which raises TypeError or ValueError for a value that the Param does not accept.
        doc: noun phrase or clause for ``explainParams`` and for error messages.
        default: default for estimators and models, None for no default; a class may override it in its
            ``_own_defaults``.
        check: check of the value before a fit; None for no check.
        field: name of the spec's field that gets the value; None if there is none.
        more: further sentences, for ``explainParam``, the site and the schema of job files.
    """

    def __init__(
        self,
        kind: Callable[[Any], V],
        doc: str,
        *,
        default: Any = None,
        check: Check | None = None,
        field: str | None = None,
        more: str = "",
    ) -> None:
        converter = TypeConverters.identity if isinstance(kind, AsGiven) else kind
        super().__init__(Params._dummy(), "", doc, converter)
        self.default, self.check, self.field, self.more = default, check, field, more

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        for verb, accessor in (("get", "Return"), ("set", "Set")):
            made = vars(owner).get(self.accessor(verb))
            if made is not None and made.__doc__ is None:
                made.__name__ = self.accessor(verb)
                made.__qualname__ = f"{owner.__qualname__}.{made.__name__}"
                made.__doc__ = f"{accessor} ``{name}``: {self.doc}."

    @property
    def holds_object(self) -> bool:
        """Whether the Param holds a Python object, such as a module or a function, without conversion."""
        return self.typeConverter is TypeConverters.identity

    def reword(self, doc: str, *, more: str = "") -> Self:
        """Return a copy with another text, for a class in which the Param takes other values or means more or less."""
        made = copy(self)
        made.doc, made.more = doc, more
        return made

    def accessor(self, verb: str) -> str:
        """Return the name of the getter or the setter."""
        return f"{verb}{self.name[0].upper()}{self.name[1:]}"

    def checked_value(self, instance: Params) -> V:
        """Return the value for an instance, after the check.

        Raises:
            ParamError: if the value cannot work.
        """
        value = instance.getOrDefault(self)
        if self.check is not None:
            self.check(self, value)
        return value

    def setter(self) -> Callable[[P, V | None], P]:
        """Return the setter, which returns its instance."""

        def setter(instance: P, value: V | None) -> P:
            return instance._set(**{self.name: value})

        return setter

    def summary(self, default: Any) -> str:
        """Return a sentence about the Param and its default, for the documentation of a class."""
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        if isinstance(default, str):
            shown = f'``"{default}"``'
        shown = "" if default is None else f"; default {shown}"
        return f"{self.doc}{shown}."

    def explanation(self, default: Any) -> str:
        """Return all that is said about the Param: the summary and ``more``."""
        return " ".join(filter(None, (self.summary(default), self.more)))


def param(
    kind: Callable[[Any], V],
    doc: str,
    *,
    default: Any = None,
    check: Check | None = None,
    field: str | None = None,
    more: str = "",
) -> tuple[Entry[V], Callable[[Any], V], Callable[[P, V | None], P]]:
    """Return a Param, its getter and its setter; see :class:`Entry` for the arguments."""
    entry = Entry(kind, doc, default=default, check=check, field=field, more=more)

    def getter(self: Params) -> V:
        return cast("V", self.getOrDefault(entry.name))

    return entry, getter, entry.setter()


def optional(
    kind: Callable[[Any], V],
    doc: str,
    *,
    check: Check | None = None,
    field: str | None = None,
    more: str = "",
) -> tuple[Entry[V], Callable[[Any], V | None], Callable[[P, V | None], P]]:
    """Return a Param without a default, its getter, which returns None if it is not set, and its setter.

    See :class:`Entry` for the arguments.
    """
    entry = Entry(kind, doc, check=check, field=field, more=more)

    def getter(self: Params) -> V | None:
        return self.getOrDefault(entry.name) if self.isDefined(entry.name) else None

    return entry, getter, entry.setter()


def entries_of(owner: type | Params) -> list[Entry[Any]]:
    """Return the entries of a class or an instance, sorted by name."""
    kind = owner if isinstance(owner, type) else type(owner)
    entries = [param for param in params_of(kind) if isinstance(param, Entry)]
    return entries if kind is owner else [getattr(owner, entry.name) for entry in entries]


def params_of(kind: type) -> list[Param[Any]]:
    """Return the Params of a class, sorted by name."""
    attributes: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        attributes.update(vars(base))
    return [value for _, value in sorted(attributes.items()) if isinstance(value, Param)]


def default_values(owner: type) -> dict[str, Any]:
    """Return the defaults of a class by Param name: the defaults of the table, overridden by ``_own_defaults``."""
    values = {entry.name: entry.default for entry in entries_of(owner) if entry.default is not None}
    for base in reversed(owner.__mro__):
        values.update(vars(base).get("_own_defaults", {}))
    return values


def spec_fields(params: Params, **known: Any) -> dict[str, Any]:
    """Return the fields of the spec that are set by Params, with their values, or with those that are known."""
    fields = {
        entry.field: getattr(params, entry.accessor("get"))()
        for entry in entries_of(params)
        if entry.field is not None and entry.field not in known
    }
    return fields | known


def check_entries(params: Params) -> None:
    """Check the value of each Param that has one.

    Raises:
        ParamError: if a value cannot work; the message names the Param, its value and what it may be.
    """
    for entry in entries_of(params):
        if params.isDefined(entry):
            with check_of(entry.name):
                entry.checked_value(params)


@contextmanager
def check_of(*names: str) -> Iterator[None]:
    """Context of a check of Params, which notes their names in a ParamError that has none."""
    try:
        yield
    except ParamError as error:
        if not error.params:
            error.about(*names)
        raise


def at_least(least: float) -> Check:
    """Return a check that a number, or each number of a list, is at least ``least``."""
    return partial(_check_range, low=least, has_low=True)


def above(limit: float) -> Check:
    """Return a check that a number, or each number of a list, is greater than ``limit``."""
    return partial(_check_range, low=limit)


def between(low: float, high: float, *, has_low: bool = False) -> Check:
    """Return a check that a number is above ``low`` and below ``high``; with ``has_low`` it may equal ``low``."""
    return partial(_check_range, low=low, high=high, has_low=has_low)


def _check_range(
    param: Param[Any], value: Any, *, low: float, high: float = float("inf"), has_low: bool = False
) -> None:
    for number in value if isinstance(value, list) else [value]:
        if not ((low <= number if has_low else low < number) and number < high):
            wanted = f"at least {low:g}" if has_low else f"above {low:g}"
            wanted += f" and below {high:g}" if high < float("inf") else ""
            raise ParamError(f"Param {param.name} must be {wanted}, got {value}: {param.doc}.")


def with_arguments(made: T) -> T:
    """Add an ``Args:`` section with all Params to the documentation of an estimator, from the table."""
    defaults = default_values(made)
    constructor: Any = made.__init__  # type: ignore[misc]  # of a class, not of an instance
    signature = inspect.signature(constructor)
    arguments = list(signature.parameters)
    entries = sorted(
        entries_of(made),
        key=lambda entry: arguments.index(entry.name) if entry.name in arguments else len(arguments),
    )
    lines = [
        textwrap.fill(
            f"{entry.name}: {entry.summary(defaults.get(entry.name))}",
            _WIDTH - 4,
            initial_indent="    ",
            subsequent_indent="        ",
        )
        for entry in entries
    ]
    # Notebooks complete the arguments that this names.
    named = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    others = [
        inspect.Parameter(entry.name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for entry in entries
        if entry.name not in arguments
    ]
    constructor.__signature__ = signature.replace(parameters=[*named, *others])
    made.__doc__ = "\n".join([f"{inspect.getdoc(made)}\n\n{_ABOUT_PARAMS}\n\nArgs:", *lines, ""])
    return made


_ABOUT_PARAMS = """\
The arguments are Params of Spark ML, each with a getter and a setter, such as ``getEpochs`` and ``setEpochs``.
``explainParam("cache")`` says more about one."""
