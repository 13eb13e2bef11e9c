"""Names for processes, by which another process can tell for certain that one of them has ended.

A name holds the boot and the PID namespace of the system (only there does a PID mean the same
process), the PID, and the process's start time, because PIDs are used again. Host names are no
part of it: containers share and change them.
"""

import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
DEAD = ("Z", "X")


class ProcessId(NamedTuple):
    """One process. place: boot and PID namespace; started: clock ticks since the boot."""

    place: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.place}/{self.pid}/{self.started}"


def process_id(pid: int | None = None) -> str:
    """Return the name of a process that runs here; this one by default. Empty where the system
    has no such names.
    """
    number = os.getpid() if pid is None else pid
    here, stat = place(), _stat(number)
    return str(ProcessId(here, number, stat[1])) if here and stat else ""


def runs_here(name: str) -> bool:
    """Is there such a process, and can this one see it?"""
    process = _parsed(name)
    stat = _stat(process.pid) if process is not None and process.place == place() else None
    return (
        process is not None
        and stat is not None
        and stat[1] == process.started
        and not _is_dead(process.pid, stat[0])
    )


def has_ended(name: str) -> bool:
    """Has a process ended that was seen to run here? False wherever that is not certain."""
    process = _parsed(name)
    if process is None or process.place != place():
        return False
    try:
        state, started = _read_stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, ValueError, IndexError):
        return False
    return started != process.started or _is_dead(process.pid, state)


def place() -> str:
    """Return where PIDs mean the same processes as here; empty where that cannot be told."""
    return _place_of(os.getpid())


@lru_cache(maxsize=1)
def _place_of(pid: int) -> str:
    """Of this process. Empty where PIDs cannot be compared: not Linux, or a /proc of another
    namespace.
    """
    try:
        if os.readlink(PROC / "self") != str(pid):
            return ""
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(PROC / 'self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _parsed(name: str) -> ProcessId | None:
    where, *numbers = name.rsplit("/", 2)
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        return None
    return ProcessId(where, *map(int, numbers))


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        return _read_stat(pid)
    except (OSError, ValueError, IndexError):
        return None


def _read_stat(pid: int) -> tuple[str, int]:
    """State and start time. The command's name before them may hold spaces and brackets."""
    fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])


def _is_dead(pid: int, state: str) -> bool:
    """A zombie counts as ended; a process of which only the main thread has ended does not."""
    if state not in DEAD:
        return False
    try:
        return len(os.listdir(PROC / str(pid) / "task")) <= 1
    except OSError:
        return True
