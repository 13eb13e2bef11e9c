"""Configuration of glibc's allocator for the reuse of large buffers."""

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
# glibc up to 2.34 refuses larger mmap thresholds
MAX_OLD_THRESHOLD_BYTES = 32 << 20


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
