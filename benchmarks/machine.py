"""What was measured on: without it a number means nothing."""

import os
import platform
from importlib import metadata
from pathlib import Path

LIBRARIES = ("grpcio", "numpy", "protobuf", "torch")


def machine() -> dict[str, str]:
    """Processor, cores that this process may use, memory, kernel; and how busy it was before."""
    return {
        "processor": _line("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{int((_line('/proc/meminfo', 'MemTotal') or '0').split()[0]) / 2**20:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in LIBRARIES},
    }


def _line(file: str, key: str) -> str:
    """The value of the first `key: value` line."""
    path = Path(file)
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""
