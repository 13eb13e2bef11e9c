"""How much memory this process may use."""

import os
from pathlib import Path

CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def usable_memory(limits: tuple[Path, ...] = CGROUPS) -> int:
    """Bytes: the machine's, or what its container may have if that is less. (Kernel
    documentation, cgroup-v2.)
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(found for path in limits if (found := _limit(path)) is not None)])


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # "max": no limit
