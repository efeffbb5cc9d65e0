"""Messages sent from a thread, and warnings about them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sparkdl.tracking.sender import Message, MessageRefusedError, Sender


@pytest.mark.parametrize("is_refused", [False, True])
def test_message_that_fails_after_close_is_kept_without_a_warning(tmp_path: Path, is_refused: bool) -> None:
    """The folder of the model is removed when the fit returns, while the upload may still read it."""
    folder = tmp_path / "mlflow_model"
    folder.mkdir()
    is_sending, is_removed, warnings = threading.Event(), threading.Event(), []

    def send(message: Message) -> None:
        is_sending.set()
        assert is_removed.wait(30)
        try:
            list(message.folder.iterdir())
        except OSError as error:
            if is_refused:
                raise MessageRefusedError from error
            raise

    before = threading.enumerate()
    sender = Sender(send, warn=lambda *words: warnings.append(words), name="the fit")
    sender.put(Message(kind="model", content={}, folder=folder))
    assert is_sending.wait(30)
    assert not sender.wait(0.01)
    assert [message.folder for message in sender.close()] == [folder]
    (thread,) = (thread for thread in threading.enumerate() if thread not in before)
    folder.rmdir()
    is_removed.set()
    thread.join(30)
    assert not thread.is_alive()
    assert warnings == []
