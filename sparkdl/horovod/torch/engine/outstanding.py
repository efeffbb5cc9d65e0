"""The requests that this rank has made and that have not run."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from sparkdl.horovod.torch.engine.description import Kind
from sparkdl.horovod.torch.engine.request import Request
from sparkdl.horovod.torch.exceptions import HorovodInternalError

_DUPLICATE_NAME = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently "
    "being processed.  If you want to request another tensor, use a different tensor name."
)


class Outstanding:
    """Requests by name, in the order of submission; for any number of threads."""

    def __init__(self, completed: threading.Condition) -> None:
        """Begin without any.

        Args:
            completed: told when a request is done that a thread sleeps for; its lock is that of the requests.
        """
        self._completed = completed
        self._requests: dict[str, Request[Any]] = {}
        self._numbers: Counter[str] = Counter()
        self._failure: HorovodInternalError | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def next_number(self, prefix: str) -> int:
        """Count the requests without a name, so that they are matched in the order of submission."""
        with self._completed:
            self._numbers[prefix] += 1
            return self._numbers[prefix]

    def add(self, request: Request[Any]) -> None:
        """Take a request, behind those that are here.

        Raises:
            ValueError: if a request of this name is outstanding.
            HorovodInternalError: if no requests are taken any more.
        """
        with self._completed:
            if self._failure is not None:
                raise HorovodInternalError(str(self._failure)) from self._failure
            if request.description.name in self._requests:
                raise ValueError(_DUPLICATE_NAME)
            self._requests[request.description.name] = request

    def refuse_more(self, failure: HorovodInternalError) -> None:
        """Take no more requests, for this reason or the one that there was before."""
        with self._completed:
            self._failure = self._failure or failure

    def oldest(self) -> Request[Any] | None:
        """The request that has been here for longest, if there is any."""
        with self._completed:
            return next(iter(self._requests.values()), None)

    def find(self, name: str) -> Request[Any] | None:
        """The request of this name, if it is here."""
        with self._completed:
            return self._requests.get(name)

    def requests(self) -> list[Request[Any]]:
        """All requests, in the order of submission."""
        with self._completed:
            return list(self._requests.values())

    def finish(self, request: Request[Any], error: BaseException | None = None) -> None:
        """Take note that a request is done, or has failed."""
        with self._completed:
            del self._requests[request.description.name]
            if request.description.kind is Kind.JOIN:
                # Ranks that had joined have not counted what the others ran without them.
                self._numbers.clear()
            request.error = error
            request.done = True
            if request.is_awaited:
                self._completed.notify_all()

    def fail(self, failure: HorovodInternalError) -> None:
        """Fail all requests, and refuse more."""
        self.refuse_more(failure)
        while (request := self.oldest()) is not None:
            self.finish(request, failure)
