"""The session of this process; there is one at a time, as in Horovod's interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkdl.horovod.torch.session import Session

_session: Session | None = None


def begin_session(session: Session) -> None:
    """Set the session of this process."""
    global _session  # noqa: PLW0603  # Horovod's interface is one per process
    _session = session


def end_session() -> None:
    """Close this process's session, if there is one."""
    global _session  # likewise
    session, _session = _session, None
    if session is not None:
        session.close()


def has_session() -> bool:
    """Whether ``init`` has been called, and ``shutdown`` has not been called since."""
    return _session is not None


def session(error: type[Exception] = ValueError) -> Session:
    """The session of this process.

    Raises:
        ValueError: if there is none, or the other ``error``: operations on tensors raise Horovod's.
    """
    if _session is None:
        raise error("Horovod has not been initialized; use hvd.init().")
    return _session
