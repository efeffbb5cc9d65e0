"""Settings of the trainings of these tests."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # such small layers only wait for torch's threads
