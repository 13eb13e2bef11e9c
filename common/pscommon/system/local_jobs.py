"""Registry of this user's jobs on this machine: shard 0 writes its address to a small file. So do
the other shards where there are tokens: commands find these by the address of any shard.

The files lie in XDG_RUNTIME_DIR/paramserver if only this user can write to XDG_RUNTIME_DIR, else
in /tmp/paramserver-UID. The folder has mode 0700 and belongs to the user; a folder that does
not, or a symbolic link in its place, is refused. Files have mode 0600 and are replaced as a
whole. A file whose process has ended is removed by the next reader or writer
(pscommon.system.process_id tells). Files of another PID namespace (a container) are neither
listed nor removed.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pscommon.core.errors import InvalidRequestError
from pscommon.system.process_id import has_ended, is_running, process_id

FALLBACK = "/tmp/paramserver-{uid}"
MAX_FILE_BYTES = 65536
SUFFIX, SHARD_SUFFIX = ".json", ".shard"
"""Of the files of shard 0 and of other shards, which earlier releases would list as jobs."""


@dataclass(frozen=True, slots=True)
class LocalJob:
    """A running job, or another shard of one.

    Attributes:
        job: name of the job; empty if a shard does not know it yet.
        address: HOST:PORT of the shard.
        pid: PID of the shard.
        process: process name of the shard (process_id); empty if unsupported.
        role, token: a token of the servers with the most rights, and its role; empty: none.
        shard: its number; 0 stands for the job.
    """

    job: str
    address: str
    pid: int
    process: str = ""
    role: str = ""
    token: str = field(default="", repr=False)
    shard: int = 0

    def __str__(self) -> str:
        return f"job {self.job} at {self.address} (pid {self.pid})"


class JobAnnouncement:
    """File of one running shard; the constructor raises OSError if it cannot be written."""

    def __init__(
        self, job: str, address: str, role: str = "", token: str = "", shard: int = 0
    ) -> None:
        """role, token, shard: as in LocalJob; only this user can read the file."""
        pid, suffix = os.getpid(), SHARD_SUFFIX if shard else SUFFIX
        self._name = f"{pid}-{address.rpartition(':')[2]}{suffix}"
        entry = LocalJob(job, address, pid, process_id(), role, token, shard)
        with _folder(make=True) as folder:
            list(_running(folder))  # removes the files of ended processes
            _write(folder, self._name, json.dumps(asdict(entry)).encode())

    def remove(self) -> None:
        """Remove the file. Repeating it is harmless."""
        with suppress(OSError), _folder(make=False) as folder:
            os.unlink(self._name, dir_fd=folder)


def local_jobs() -> list[LocalJob]:
    """Return the running jobs, by process number. Raises OSError; see `local_shards`."""
    return [entry for entry in local_shards() if entry.shard == 0]


def local_shards() -> list[LocalJob]:
    """Return the running jobs, and their other shards where there are tokens, by process number.

    Raises OSError for a folder that is not private.
    """
    try:
        with _folder(make=False) as folder:
            return sorted(_running(folder), key=lambda entry: (entry.pid, entry.address))
    except FileNotFoundError:
        return []


def only_local_job(missing: str, job: str = "") -> LocalJob:
    """Return the user's only job on this machine.

    Args:
        missing: What is missing; the error message begins with it.
        job: Name of the job; empty: any.

    Raises:
        InvalidRequestError: There is no such job, or several; the message lists them.
    """
    try:
        found = [entry for entry in local_jobs() if job in ("", entry.job)]
    except OSError as error:
        raise InvalidRequestError(f"{missing}; local jobs cannot be listed: {error}") from error
    if not found:
        named = f" called {job}" if job else ""
        raise InvalidRequestError(f"{missing}; no job of this user{named} runs on this machine")
    if len(found) > 1:
        listed = "; ".join(str(entry) for entry in found)
        raise InvalidRequestError(
            f"{missing}; several jobs of this user run on this machine. Try: one of {listed}"
        )
    return found[0]


@contextmanager
def _folder(make: bool) -> Iterator[int]:
    """Yield a descriptor of the folder, checked after opening so that it cannot be exchanged."""
    path = _folder_path(os.environ)
    if make:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _is_private(os.fstat(folder), 0o077):
            raise PermissionError(f"{path} is not a folder that only this user can read and write")
        yield folder
    finally:
        os.close(folder)


def _folder_path(environ: Mapping[str, str]) -> Path:
    runtime = Path(environ.get("XDG_RUNTIME_DIR") or ".")
    with suppress(OSError):
        if runtime.is_absolute() and _is_private(runtime.stat(), 0o022):
            return runtime / "paramserver"
    return Path(FALLBACK.format(uid=os.geteuid()))


def _is_private(found: os.stat_result, others: int) -> bool:
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & others
    )


def _write(folder: int, name: str, content: bytes) -> None:
    temporary = f".{name}"
    with suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(content)
    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def _running(folder: int) -> Iterator[LocalJob]:
    """Yield the jobs whose process runs; remove the files of the others."""
    for name in os.listdir(folder):
        if name.startswith(".") or not name.endswith((SUFFIX, SHARD_SUFFIX)):
            continue
        if (entry := _read(folder, name)) is None:
            continue
        if is_running(entry.process) if entry.process else _answers_signals(entry.pid):
            yield entry
        elif not entry.process or has_ended(entry.process):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)


def _read(folder: int, name: str) -> LocalJob | None:
    """Return the job of a file; None for a foreign or invalid file."""
    try:
        # NONBLOCK: opening a pipe must not wait for its writer
        number = os.open(
            name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
        )
        with open(number, "rb") as file:
            found = os.fstat(number)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                return None
            return _entry(json.loads(file.read(MAX_FILE_BYTES)))
    except (OSError, ValueError):
        return None


def _entry(raw: Any) -> LocalJob | None:
    kinds = {"job": str, "address": str, "pid": int, "process": str, "role": str, "token": str}
    kinds["shard"] = int
    if not isinstance(raw, dict):
        return None
    # absent in a file of an earlier release
    found = {"role": "", "token": "", "shard": 0, **raw}
    if any(type(found.get(name)) is not kind for name, kind in kinds.items()):
        return None
    return LocalJob(**{name: found[name] for name in kinds})


def _answers_signals(pid: int) -> bool:
    """Return whether a process with this PID exists; without names it may be a later one."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
