"""Which of Arrow's allocators a process that reads much takes: one that gives memory back."""

from __future__ import annotations

ARROW_VARIABLES = {"ARROW_DEFAULT_MEMORY_POOL": "jemalloc"}
"""Environment variables to begin with; what the user has set wins.

Arrow's default, mimalloc, keeps what one thread decoded and another has freed: reading lists of 784 floats within a
bound of 128 MiB took 290 to 410 MiB with it, and 220 to 300 with jemalloc, at the same speed; Arrow itself never held
more than 200. Having mimalloc give memory back at once (``MIMALLOC_PURGE_DELAY=0``) takes a quarter to a half more of
the processor's time.
"""
