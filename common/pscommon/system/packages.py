"""Versions of installed distributions, cached because each look-up takes 2 ms."""

import functools
import importlib.metadata


@functools.cache
def installed(name: str) -> str:
    """Return the version of a distribution.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
    """
    return importlib.metadata.version(name)
