"""A file that knows what was written to it, so that nobody has to read it again for its checksum. Runs anywhere."""

from __future__ import annotations

import hashlib
from typing import IO, Any


class HashingFile:
    """Takes what is written, in its order, and knows how much it was and its SHA-256.

    Args:
        file: where it goes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def write(self, data: Any) -> int:
        """Write bytes, or what lies in memory as they do; return how many they were."""
        self._digest.update(data)
        self._file.write(data)
        num_bytes = memoryview(data).nbytes
        self._num_bytes += num_bytes
        return num_bytes

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()

    def describe(self) -> dict[str, Any]:
        """Return the size as ``bytes`` and the checksum as ``sha256``."""
        return {"bytes": self._num_bytes, "sha256": self._digest.hexdigest()}
