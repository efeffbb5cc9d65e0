"""The program for spark-submit: ``spark-submit ... "$(sparkdl job-script)" job.yaml epochs=3``.

It is in a folder of its own, as Python puts the folder of a program at the head of ``sys.path``.
"""

from __future__ import annotations

import sys

from sparkdl.jobs.command import run_submitted

if __name__ == "__main__":
    sys.exit(run_submitted())
