"""The settings of a monitor: what is watched, how often, and where the figures go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ParamError
from sparkdl.slow_links import as_dict, settings_of

if TYPE_CHECKING:
    from sparkdl.monitor.board import Board
    from sparkdl.monitor.sampler import RankSampler


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """Watches the ranks of a fit or a run. ``TorchEstimator(monitor=Monitor())`` and ``Runner(monitor=...)`` take it.

    A thread of each rank takes a sample every few seconds and sends it to the driver, on the connection of its
    heartbeats; ranks do not wait for each other. The driver writes the samples to MLflow and to a file that
    ``sparkdl top`` shows, and wherever else the settings say.

    Attributes:
        seconds: seconds from one sample to the next, from 0.1 to 3600.
        tensorboard: folder on the driver for TensorBoard; None for none. Needs tensorboard.
        port: port of the driver at which Prometheus finds the figures, on loopback alone; 0 for any free port, None for
            none. Needs prometheus_client.
        trace: path of a file on the driver for a trace of some steps of all ranks, which https://ui.perfetto.dev opens;
            None for none. All ranks have to make these steps.
        trace_steps: numbers of the first and the last step of the trace, counted from 1 over all epochs.
        tokens: name of the column of tokens, for tokens per second; None for ``tokens`` or ``input_ids``, if there is
            such a column.
        peak_tflops: the most that a rank's device can compute, in TFLOP/s; None for the figure of the GPU's data sheet,
            or what the threads of a rank on a CPU reach in products of matrices.
    """

    seconds: float = 5.0
    tensorboard: str | None = None
    port: int | None = None
    trace: str | None = None
    trace_steps: tuple[int, int] = (10, 12)
    tokens: str | None = None
    peak_tflops: float | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        self._check(
            "seconds", lambda value: _is_number(value) and 0.1 <= value <= 3600, "a number from 0.1 to 3600"
        )
        self._check("port", lambda value: type(value) is int and 0 <= value < 65536, "a port: 0 to 65535")
        self._check("peak_tflops", lambda value: _is_number(value) and value > 0, "a number above 0")
        if isinstance(self.trace_steps, list):  # of JSON
            object.__setattr__(self, "trace_steps", tuple(self.trace_steps))
        self._check("trace_steps", _are_steps, "two numbers of steps from 1, the first and the last one")
        for name in ("tensorboard", "trace", "tokens"):
            self._check(name, lambda value: isinstance(value, str) and bool(value), "a text")

    def _check(self, name: str, fits: Callable[[Any], bool], wanted: str) -> None:
        value = getattr(self, name)
        is_left_out = value is None and name not in ("seconds", "trace_steps")
        if not is_left_out and not fits(value):
            raise ParamError(f"{name} of a Monitor is {value!r}; it has to be {wanted}.")

    def as_dict(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, as JSON can hold them."""
        settings = as_dict(self)
        del settings["kind"]
        return settings

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Monitor:
        """Make a monitor from its settings by name.

        Raises:
            ParamError: if there is no such setting, or a value cannot work.
        """
        made: Monitor = settings_of({**given, "kind": cls.__name__}, (cls,))
        return made

    def on_driver(self, name: str, log_metrics: Callable[[int, dict[str, float]], None]) -> Board:
        """Return what takes the samples of the ranks, and gives the figures away; a context manager.

        Args:
            name: name of the fit or run.
            log_metrics: function that logs the number of a sample and figures by name to MLflow.

        Raises:
            ParamError: if a library is missing, a file or folder cannot be written or the port is taken.
        """
        from sparkdl.monitor.board import Board
        from sparkdl.monitor.exports import open_exports
        from sparkdl.monitor.trace import TraceFile

        with ExitStack() as opened:
            trace = None if self.trace is None else TraceFile(self.trace)
            if trace is not None:
                opened.callback(trace.close)
            board = Board(name, open_exports(self, log_metrics), trace)
            opened.pop_all()
            return board

    def on_rank(
        self, rank: int, world_size: int, report: Callable[[dict[str, Any]], None], precision: str = ""
    ) -> RankSampler:
        """Return what samples this rank, from when its context is entered; a context manager.

        Args:
            rank: number of this rank.
            world_size: number of ranks.
            report: function that sends an event to the driver.
            precision: dtype of the computations, which decides the peak rate of a GPU; empty if it is not known.
        """
        from sparkdl.monitor.sampler import RankSampler

        return RankSampler(self, rank=rank, world_size=world_size, report=report, precision=precision)


def _are_steps(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(type(step) is int for step in value)
        and 1 <= value[0] <= value[1]
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
