"""Versions of installed packages, found without importing them. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

from sparkdl import __version__


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of sparkdl and of those ``packages`` that are installed, by package name."""
    versions = {"sparkdl": __version__}
    for package in packages:
        try:
            versions.setdefault(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            continue
    return versions
