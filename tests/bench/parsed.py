"""Options of a benchmark, as its command reads them."""

from __future__ import annotations

import argparse
from types import ModuleType


def parsed(benchmark: ModuleType, *arguments: str) -> argparse.Namespace:
    """Parse the arguments of a benchmark."""
    parser = argparse.ArgumentParser()
    benchmark.add_arguments(parser)
    return parser.parse_args(arguments)
