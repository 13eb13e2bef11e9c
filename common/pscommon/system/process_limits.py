"""Limits of this process, files and memory, and how its memory is allocated."""

import ctypes
import os
import resource
from contextlib import suppress
from pathlib import Path

UNLIMITED_COUNT = 1 << 20

CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
# glibc up to 2.34 refuses larger mmap thresholds
MAX_OLD_THRESHOLD_BYTES = 32 << 20


def raise_file_limit() -> int:
    """Raise the limit as far as the system allows; return the number of files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return UNLIMITED_COUNT if limit == resource.RLIM_INFINITY else limit


def usable_memory(limits: tuple[Path, ...] = CGROUPS) -> int:
    """Return the memory of the machine or the cgroup limit, whichever is less, in bytes."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(found for path in limits if (found := _limit(path)) is not None)])


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # "max": no limit


def tune_malloc() -> bool:
    """Let malloc reuse freed memory instead of returning it to the system.

    Frames of 1 MiB are then not mapped and unmapped each time: up to twice as fast. The setting
    is global: only for the main program of a process, once, before it allocates much.

    Returns:
        False, without any change, if the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
        ctypes.CDLL(None).gnu_get_libc_version  # noqa: B018
    except (OSError, AttributeError, TypeError):
        return False
    mapped = mallopt(M_MMAP_THRESHOLD, 1 << 30) or mallopt(
        M_MMAP_THRESHOLD, MAX_OLD_THRESHOLD_BYTES
    )
    return bool(
        mapped and mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1) and mallopt(M_TOP_PAD, 64 << 20)
    )
