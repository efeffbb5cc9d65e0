"""Settings with which ranks send less over slow links: local steps between synchronizations, or compressed gradients.

They are values that a driver can check and send to ranks. :class:`sparkdl.torch.LocalUpdates` carries out
:class:`LocalSGD` and :class:`DiLoCo`, and :class:`sparkdl.torch.DataParallel` carries out :class:`PowerSGD` and
:class:`TopK`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from sparkdl.errors import ParamError, did_you_mean

GROUPS = ("rank", "host")


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Ranks update their own weights for some steps, and then all take the average of their weights.

    After Stich, "Local SGD Converges Fast and Communicates Little" (2019). With ``begin_after`` it is post-local SGD of
    Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (2020).

    Attributes:
        every: number of updates between two synchronizations; with 1 and plain SGD the result is that of averaged
            gradients.
        begin_after: number of updates with averaged gradients before the first local one.
        group: ranks that average their gradients in each step, so that they have the same weights: ``"rank"`` for
            none but the rank itself, ``"host"`` for the ranks of a host.
    """

    every: int
    begin_after: int = 0
    group: str = "rank"

    def __post_init__(self) -> None:
        """Check the values."""
        _check_count(self, "every", 1)
        _check_count(self, "begin_after", 0)
        _check(self, "group", " or ".join(map(repr, GROUPS)), self.group in GROUPS)


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """Ranks update their own weights for some steps, and an outer optimizer takes the average of their progress.

    After Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023): the outer
    optimizer is SGD with Nesterov momentum, and the inner one is the optimizer of the training. With ``overlap`` the
    average is computed while the next steps run, and the outer step is made one synchronization late, after Douillard
    et al., "Streaming DiLoCo with overlapping communication" (2025), and Kale et al., "Eager Updates For Overlapped
    Communication and Computation in DiLoCo" (2025): meanwhile each rank keeps its own progress.

    Attributes:
        every: number of updates between two synchronizations.
        learning_rate: learning rate of the outer optimizer.
        momentum: Nesterov momentum of the outer optimizer.
        overlap: whether the average is computed while the next steps run.
        begin_after: number of updates with averaged gradients before the first local one.
        group: ranks that average their gradients in each step, so that they have the same weights: ``"rank"`` for
            none but the rank itself, ``"host"`` for the ranks of a host.
    """

    every: int
    learning_rate: float = 0.7
    momentum: float = 0.9
    overlap: bool = False
    begin_after: int = 0
    group: str = "rank"

    def __post_init__(self) -> None:
        """Check the values."""
        _check_count(self, "every", 1)
        _check_count(self, "begin_after", 0)
        _check(self, "group", " or ".join(map(repr, GROUPS)), self.group in GROUPS)
        _check_number(self, "learning_rate", "a number above 0; the paper takes 0.7", lambda rate: rate > 0)
        _check_number(
            self, "momentum", "a number from 0 to below 1; the paper takes 0.9", lambda share: 0 <= share < 1
        )


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """Gradients of matrices are sent as products of two thin matrices, with error feedback.

    After Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (2019), with
    one power iteration per step, which begins with the last step's matrix. Gradients of vectors, and those that two
    thin matrices would not make smaller by half, are sent as they are.

    Attributes:
        rank: number of columns of the thin matrices.
        begin_after: number of updates with uncompressed gradients before the first compressed one.
        seed: seed of the first matrices.
    """

    rank: int
    begin_after: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        _check_count(self, "rank", 1)
        _check_count(self, "begin_after", 0)


@dataclass(frozen=True, kw_only=True)
class TopK:
    """Each rank sends the largest elements of its gradients alone, with error feedback.

    After Stich et al., "Sparsified SGD with Memory" (2018), and Lin et al., "Deep Gradient Compression" (2018), without
    the latter's momentum correction; the error feedback is that of Karimireddy et al., "Error Feedback Fixes SignSGD
    and other Gradient Compression Schemes" (2019).

    Attributes:
        ratio: share of the elements of a bucket of gradients that each rank sends.
        begin_after: number of updates with uncompressed gradients before the first compressed one.
    """

    ratio: float
    begin_after: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        _check_number(
            self, "ratio", "a share above 0 and at most 1, such as 0.01", lambda share: 0 < share <= 1
        )
        _check_count(self, "begin_after", 0)


Synchronization: TypeAlias = LocalSGD | DiLoCo
Compression: TypeAlias = PowerSGD | TopK

SYNCHRONIZATIONS: tuple[type[Any], ...] = (LocalSGD, DiLoCo)
COMPRESSIONS: tuple[type[Any], ...] = (PowerSGD, TopK)


def as_dict(settings: Any) -> dict[str, Any]:
    """Return settings as a dict that JSON can hold: their class as ``kind``, and values other than the defaults."""
    plain = {field.name: field.default for field in fields(settings)}
    changed = {name: value for name, value in asdict(settings).items() if value != plain[name]}
    return {"kind": type(settings).__name__, **changed}


def settings_of(given: Mapping[str, Any], kinds: tuple[type[Any], ...]) -> Any:
    """Return the settings of a dict that :func:`as_dict` returned, or that a user wrote.

    Raises:
        ParamError: if the dict does not describe settings of one of ``kinds``.
    """
    by_name = {kind.__name__: kind for kind in kinds}
    name = str(given.get("kind"))
    if name not in by_name:
        raise ParamError(f"kind is {given.get('kind')!r}; it may be {' or '.join(map(repr, by_name))}.")
    values = {key: value for key, value in given.items() if key != "kind"}
    known = list(by_name[name].__dataclass_fields__)
    for key in values:
        if key not in known:
            hint = did_you_mean(key, known, otherwise=f"It takes {', '.join(known)}.", show=repr)
            raise ParamError(f"{name} has no setting {key!r}. {hint}")
    try:
        return by_name[name](**values)
    except TypeError as error:
        raise ParamError(f"{name} cannot be made of {values}: {error}") from error


def _check_count(settings: Any, name: str, least: int) -> None:
    value = getattr(settings, name)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    _check(settings, name, f"an integer of at least {least}", is_integer and value >= least)


def _check_number(settings: Any, name: str, wanted: str, fits: Callable[[float], bool]) -> None:
    value = getattr(settings, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    _check(settings, name, wanted, is_number and fits(value))


def _check(settings: Any, name: str, wanted: str, is_valid: bool) -> None:
    if not is_valid:
        raise ParamError(
            f"{name} of {type(settings).__name__} is {getattr(settings, name)!r}; it has to be {wanted}."
        )
