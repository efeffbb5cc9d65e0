"""The session of this process, of which there is one at a time, as Horovod's interface has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.horovod.torch.names import HorovodInternalError

if TYPE_CHECKING:
    from sparkdl.horovod.torch.session import Session

_NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."

_session: Session | None = None


def begin_session(session: Session) -> None:
    """Make a session that of this process."""
    global _session  # noqa: PLW0603  # Horovod's interface is one per process
    _session = session


def end_session() -> None:
    """Close this process's session, if there is one."""
    global _session  # likewise
    session, _session = _session, None
    if session is not None:
        session.close()


def has_session() -> bool:
    """``init`` has been called, and ``shutdown`` not since."""
    return _session is not None


def session() -> Session:
    """The session of this process.

    Raises:
        ValueError: if there is none.
    """
    if _session is None:
        raise ValueError(_NOT_INITIALIZED)
    return _session


def open_session() -> Session:
    """The session of this process, for an operation on tensors.

    Raises:
        HorovodInternalError: if there is none, as Horovod's operations have it.
    """
    if _session is None:
        raise HorovodInternalError(_NOT_INITIALIZED)
    return _session
