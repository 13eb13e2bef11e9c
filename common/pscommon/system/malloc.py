"""Keeps glibc from giving memory back after every large buffer, which costs more than moving the
bytes.
"""

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
# glibc up to 2.34 takes no larger mmap threshold than this
OLD_LIMIT = 32 << 20


def tune_malloc() -> bool:
    """Frames of 1 MiB are then reused instead of mapped, faulted in and unmapped each time; up
    to twice as fast.

    For the main program of a process of our own, once, before it allocates much: the setting is
    global, so a library must not touch it. False where the C library is not glibc; nothing is
    changed then.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
        ctypes.CDLL(None).gnu_get_libc_version  # noqa: B018
    except (OSError, AttributeError, TypeError):
        return False
    mapped = mallopt(M_MMAP_THRESHOLD, 1 << 30) or mallopt(M_MMAP_THRESHOLD, OLD_LIMIT)
    return bool(
        mapped and mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1) and mallopt(M_TOP_PAD, 64 << 20)
    )
