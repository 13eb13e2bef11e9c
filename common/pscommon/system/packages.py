"""Which versions of which distributions are installed. Looked up once: that reads and parses a
file, for 2 ms each.
"""

import functools
import importlib.metadata


@functools.cache
def installed(name: str) -> str:
    """The version of a distribution; importlib.metadata.PackageNotFoundError where there is
    none.
    """
    return importlib.metadata.version(name)
