"""The program for spark-submit: ``spark-submit ... "$(sparkdl job-script)" job.yaml epochs=3``.

In a folder of its own, as Python puts the folder of a program before all others that it imports from.
"""

from __future__ import annotations

import sys

from sparkdl.jobs.command import submitted

if __name__ == "__main__":
    sys.exit(submitted())
