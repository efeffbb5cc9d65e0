"""Checks a machine and a cluster, and reports what will not work with sparkdl and how to fix it.

:func:`examine` is for programs and notebooks; ``sparkdl doctor`` prints its findings as a table.
Runs on the *driver*, which also starts tasks and ranks to look from there. Begin with ``examination``.
"""

from __future__ import annotations

from sparkdl.doctor.examination import examine
from sparkdl.doctor.finding import Finding

__all__ = ["Finding", "examine"]
