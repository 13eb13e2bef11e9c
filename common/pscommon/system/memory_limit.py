"""Memory limit of this process."""

import os
from pathlib import Path

CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


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
