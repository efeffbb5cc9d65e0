"""Makes ``python -m sparkdl.cli`` the same as the ``sparkdl`` command."""

from __future__ import annotations

import sys

from sparkdl.cli import main

sys.exit(main())
