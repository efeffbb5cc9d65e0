"""The exceptions that sparkdl raises, each with what to do about it.

All of them can be caught as :class:`SparkdlError`. Errors that come from a rank carry its number, host and traceback.
"""

from __future__ import annotations

import difflib
import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Self


class SparkdlError(Exception):
    """Base of every exception that sparkdl raises on purpose.

    Attributes:
        position: epoch and step of a fit that the message names; empty if it names none.
    """

    position: str = ""

    def at(self, position: str) -> Self:
        """Return this error, after noting the epoch and step that its message names."""
        self.position = position
        return self


class ParamError(SparkdlError, ValueError):
    """A Param or argument has a value that cannot work; the message names it and the values it may take.

    Attributes:
        params: names of the Params of an estimator whose values are wrong; empty if the error is not of a check of
            Params.
    """

    params: tuple[str, ...] = ()

    def about(self, *params: str) -> Self:
        """Return this error, after noting the Params whose values are wrong."""
        self.params = params
        return self


class ParamTypeError(ParamError, TypeError):
    """A Param has a value of a type that it does not take; the message names both."""


class JobFileError(ParamError):
    """A job cannot be understood; the message names file, line and key, or the argument of the command line."""


class DataError(SparkdlError, ValueError):
    """The data cannot be used: a missing column, a null, strings as features, arrays of differing length.

    The message names the column and what was found. Fix the DataFrame, or choose other columns.
    """


class CorruptFileError(DataError):
    """A Parquet file is damaged; the message names file, row group and column. Write the file again."""


class FileVanishedError(DataError):
    """A Parquet file was removed while ranks read it. Keep the files until training ends."""


class FileChangedError(DataError):
    """A Parquet file was written again while ranks read it. Write to another folder, or run the job again."""


class ColumnMismatchError(DataError):
    """A column has another type or other lengths of arrays in some rows or files than in others, or is not in all.

    Cast it to one type, give lists of any length as ``shapes``, or leave it out.
    """


class EmptyDatasetError(DataError):
    """There are no rows: no files, none in them, or none that passes a filter. Look at the job that writes them."""


class ShardingError(DataError):
    """The rows cannot be shared by the ranks. Lower the number of ranks or bring more rows."""


class StoreError(SparkdlError, OSError):
    """The Store cannot be read or written. Choose a URL that the driver and every executor can write."""


class StoreFullError(StoreError):
    """The disk of the Store is full, or its quota used up. Make room, call ``Store.cleanup()``, or choose another."""


class StoreAccessError(DataError, StoreError):
    """A folder or Store cannot be read at all: no credentials, no such bucket, a server that does not answer.

    The message says which of them and what to set. Nothing is wrong with the files.
    """


class SerializationError(SparkdlError, TypeError):
    """Something that has to travel to or from the ranks, or be saved or exported, cannot; the message says why.

    Make it where it is used, such as in the function that the ranks run, or define its class in a module.
    """


class LaunchError(SparkdlError, RuntimeError):
    """The ranks cannot be started; the message names the Spark setting or the package to change."""


class SlotsMissingError(LaunchError):
    """The cluster has fewer slots than ranks, also after a wait for executors that could still come.

    Try again later, or lower ``numWorkers``.
    """


class LaunchCancelledError(LaunchError):
    """A Spark job of a fit or run was cancelled: by a notebook's Cancel, Spark's UI, a job group or a tag.

    Ranks were ended, and rows that were being written were removed. Run it again; a checkpointDir continues a fit.
    """


class RankError(SparkdlError, RuntimeError):
    """A rank failed and all ranks were ended.

    Read that rank's traceback; ``__cause__`` is its exception. Mend what raised it, and run again.

    Attributes:
        rank: number of the rank that failed first.
        host: host it ran on.
        traceback_text: that rank's Python traceback, or the end of its log when it died without one.
    """

    def __init__(self, message: str, *, rank: int, host: str, traceback_text: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.traceback_text = traceback_text

    def __reduce__(self) -> tuple[object, ...]:
        # Pickle calls the class with `args`, which hold no arguments with names.
        return functools.partial(type(self), rank=self.rank, host=self.host), self.args, vars(self)


class StandInError(SparkdlError):
    """Stands for an exception of a rank that cannot be unpickled on the driver; the message has its type and text.

    Its class is not importable there, or holds what cannot be pickled. The traceback of the rank is in ``RankError``.
    To get the exception itself, define its class in a module that the driver can import, and let it be pickled.
    """


class ProcessesLostError(SparkdlError):
    """Processes were lost: a rank was killed or hung, an executor or host was lost, or a connection was cut.

    No code of a rank raised an exception. With ``maxRestarts``, a fit continues automatically. Otherwise find out why
    the processes ended (often a lack of memory), and fit again with the same checkpointDir.
    """


class RankDiedError(ProcessesLostError, RankError):
    """A rank's process was killed, or went with its executor or its host; the message names rank and host.

    Look at that host's log for what ended it, such as a lack of memory.
    """


class LinkLostError(ProcessesLostError, RankError):
    """A connection between ranks was cut while all of their processes ran; the message names ranks and hosts.

    With ``maxRestarts``, a fit continues automatically. A Runner starts its ranks again while ``max_restarts`` are
    left, then while ``max_retries`` are.
    Look at the network between the hosts, such as a firewall that drops connections.
    """


class HangError(ProcessesLostError, RankError):
    """A rank hung, and all ranks were ended; the message names the rank and shows its Python stack.

    Usual causes are a file that never appears, a lock, an endless loop, and ranks that call operations in different
    orders. With ``maxRestarts``, a fit continues automatically. If the rank was only slow, raise the hang timeout.

    Attributes:
        report: the Python stack of every rank, and the operations in which it waited, with the waiting times.
        is_in_code: whether the ranks' code certainly caused the hang, so that it would hang again: the ranks called
            operations in different orders, or a rank made no progress.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        host: str,
        traceback_text: str = "",
        report: str = "",
        is_in_code: bool = False,
    ) -> None:
        super().__init__(message, rank=rank, host=host, traceback_text=traceback_text)
        self.report = report
        self.is_in_code = is_in_code


class ExecutorsLostError(ProcessesLostError, LaunchError):
    """Executors or their Python workers were lost, with their ranks or while a Spark job worked on rows.

    They did not report the cause, which often is a lack of memory. Look at the executors' logs, give them more memory,
    and run it again. Rows that were being written were removed.
    """


class SparkJobError(SparkdlError, RuntimeError):
    """A Spark job that reads, counts or writes rows failed; the message says which one, and what Spark said of it.

    Spark's own exception is the cause: mend what it names, and run again. Spark's classes for a query that cannot work,
    such as ``AnalysisException`` and ``PythonException``, are raised as they are.
    """


class ClusterLostError(ProcessesLostError, LaunchError):
    """Spark's application ended while a job ran: its cluster was lost, or it was stopped. Run the job again."""


class TrainingError(SparkdlError, ArithmeticError):
    """Training cannot continue: the loss is not finite, or code of the user's raised, which is then ``__cause__``.

    The message names rank, epoch and step. For a loss that is not finite, lower the learning rate, set ``maxGradNorm``
    or look at the rows of that step; otherwise mend the code that raised.
    """


class ReplicasDifferError(TrainingError):
    """Ranks that should train the same model have different weights.

    The message names a parameter, the ranks, and since when. Make sure that callbacks and other code that change
    weights outside of the optimizer do so equally on all ranks.
    """


class SavedModelError(SparkdlError, ValueError):
    """A saved model cannot be read: files are missing, damaged, or written by a newer version.

    Copy or save it again, or install a newer sparkdl.
    """


class CheckpointError(SparkdlError, ValueError):
    """A checkpointDir holds what this fit cannot continue from; the message names what differs, then and now.

    Choose another checkpointDir, set the Params as they were, or remove the checkpoints.
    """


class CheckpointsInUseError(CheckpointError):
    """Another fit or run uses the folder of checkpoints. Wait until it has ended, or choose another folder."""


class TransportUnavailableError(SparkdlError, ImportError):
    """The transport that was asked for is not installed; the message says what was tried and what to install."""


class AuthenticationError(SparkdlError, ConnectionError):
    """A peer could not prove that it knows the job's secret. Nothing that it sent was used.

    Another program answered at that address, or the ranks have secrets or versions of sparkdl that differ. Give all
    ranks those of one job.
    """


class CommunicatorError(SparkdlError, RuntimeError):
    """A collective failed. The communicator is of no further use; close it and open a new one."""


class MismatchError(CommunicatorError, ValueError):
    """The ranks disagree about an operation; the message says which rank said what, and is the same on all.

    Nothing was written, and the communicator can be used further. Give every rank the same sequence of operations.
    """


class CommunicatorTimeoutError(CommunicatorError, TimeoutError):
    """A collective missed its deadline; the message names the ranks that had not joined.

    Look at what those ranks were doing, or give the operation a longer ``timeout_s``.
    """


class CommunicatorAbortedError(CommunicatorError):
    """Some rank aborted the communicator; the message holds its reason. Mend that reason on the rank that it names."""


class WorldLeftError(CommunicatorError):
    """The ranks of an elastic fit or run form another world, because others wait to join.

    It ends the function on all ranks after the same step. Do not catch it; they continue from there with the new ranks.
    """


class RankLostError(CommunicatorError, ConnectionError):
    """A peer of the communicator died or cannot be reached any more; the message names the rank.

    Find out from that rank's log why it ended. Then open a communicator of new ranks.
    """


def did_you_mean(
    word: str, known: Iterable[str], *, otherwise: str = "", most: int = 1, show: Callable[[str], str] = str
) -> str:
    """Return a sentence for an error that names the known words that are most similar to a wrong one, or begin with it.

    Args:
        word: the unknown word.
        known: the known words.
        otherwise: text to return if no known word is similar.
        most: maximum number of words that the sentence names.
        show: function that formats a word for the sentence.
    """
    folded = {word.lower(): word for word in known}
    near = difflib.get_close_matches(word.lower(), folded, n=most, cutoff=0.6)
    near = near or [name for name in folded if name.startswith(f"{word.lower()}_")][:most]
    return f"Did you mean {' or '.join(show(folded[word]) for word in near)}?" if near else otherwise


def count_of(number: int, noun: str) -> str:
    """Return a number of things as text: ``1 thread``, ``4 threads``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def list_names(names: Iterable[str], most: int = 10) -> str:
    """Return names for an error, separated by commas: at most the first ``most``, then the number of the others."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
