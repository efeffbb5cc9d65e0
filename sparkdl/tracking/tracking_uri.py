"""Which MLflow server a program reports to, and how its address is written down. Runs on the *driver*."""

from __future__ import annotations

import importlib.util
import os
import re
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sparkdl.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Of databases a password ends at the @, as SQLAlchemy reads it; of servers the host ends at the first slash.
_USER_AND_PASSWORD = re.compile(
    r"(?P<scheme>https?://)(?:[^\s/?#@]*@)+"
    r"|(?P<database>\b(?!https?:)[a-z][\w+.-]*://)[^\s:/?#@]*(?::[^\s@]*)?@(?:[^\s/?#@]*@)*",
    re.IGNORECASE,
)
_PASSWORD_IN_QUERY = re.compile(r"(?P<name>[?&](?:password|passwd|token)=)[^\s&#]*", re.IGNORECASE)

_VARIABLE = "MLFLOW_TRACKING_URI"
_one_at_a_time = threading.RLock()


def without_credentials(text: str) -> str:
    """Return a URI, or a text that may name some, without the users and passwords in them."""
    bare = _USER_AND_PASSWORD.sub(lambda found: found["scheme"] or found["database"], text)
    return _PASSWORD_IN_QUERY.sub(lambda found: found["name"], bare)


def use_tracking_uri(uri: str) -> None:
    """Have MLflow report to a server or store, as ``mlflow.set_tracking_uri`` does.

    Raises:
        ParamError: if mlflow is not installed.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise ParamError(
            f"A fit is to be tracked at {without_credentials(uri)}, and mlflow is not installed. Install "
            "mlflow."
        )
    import mlflow

    mlflow.set_tracking_uri(uri)


@contextmanager
def reporting_to(uri: str) -> Iterator[None]:
    """Have functions of MLflow that know only the process's server report to a given one, one thread at a time.

    The process's server is as it was afterwards, also where none was set; one that the user has set meanwhile stays.
    """
    import mlflow

    with _one_at_a_time:
        before = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
        variable = os.environ.get(_VARIABLE)
        if before == uri:
            yield
            return
        mlflow.set_tracking_uri(uri)
        try:
            yield
        finally:
            if mlflow.get_tracking_uri() == uri:
                mlflow.set_tracking_uri(before)  # type: ignore[arg-type]  # None unsets it
                # MLflow writes it there as well; 2.19 does not take it back.
                if variable is None:
                    os.environ.pop(_VARIABLE, None)
                else:
                    os.environ[_VARIABLE] = variable


def with_known_credentials(uri: str) -> str:
    """Return the process's own URI where it differs from a bare one only by user and password; else the bare one."""
    import mlflow

    own = mlflow.get_tracking_uri()
    return own if without_credentials(own) == uri else uri
