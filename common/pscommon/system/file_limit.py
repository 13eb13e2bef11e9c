"""The limit of open files of this process."""

import resource
from contextlib import suppress

UNLIMITED_COUNT = 1 << 20


def raise_file_limit() -> int:
    """Raise the limit as far as the system allows; return the number of files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return UNLIMITED_COUNT if limit == resource.RLIM_INFINITY else limit
