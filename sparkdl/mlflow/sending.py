"""Sends what fits had to keep, as MLflow did not take it. Runs on the *driver*."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.tracking import SentRun, send_kept_runs

if TYPE_CHECKING:
    import os

    from sparkdl.data import Store


def send_kept(
    store: Store | str | os.PathLike[str] | None = None, *, tracking_uri: str | None = None
) -> list[SentRun]:
    """Send all that fits have kept in a Store, the oldest first; what MLflow takes is kept no longer.

    Args:
        store: of the estimators; path and URL too; default: the default Store.
        tracking_uri: of another server than the one that the fits were to tell.

    Returns:
        A record for each kept run: its ``run_id``, the ``model_uri`` of its model, and an ``error`` where it could not
        be sent and stays kept.

    Raises:
        StoreError: if the Store cannot be read or written.
    """
    from sparkdl.data import Store
    from sparkdl.data.store import as_store
    from sparkdl.estimators.unsent_runs import UnsentRuns

    return send_kept_runs(UnsentRuns(Store.default() if store is None else as_store(store)), tracking_uri)
