"""The exceptions of Horovod, under Horovod's names. Import them from :mod:`sparkdl.horovod.torch`."""

from __future__ import annotations

from sparkdl.errors import CommunicatorError


class HorovodInternalError(CommunicatorError):
    """A collective failed; ``__cause__`` is the communicator's own error, if it came from there.

    When the ranks disagreed about a tensor, all of them have this error and can go on. After anything else, call
    ``hvd.shutdown()`` and ``hvd.init()``, as :func:`sparkdl.horovod.torch.elastic.run` does.
    """


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  # Horovod's name
    """The set of ranks has changed. Never raised as long as the ranks stay; there for programs that name it.

    Attributes:
        skip_sync: whether the state need not be synchronized before going on.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync
