"""How others find a server on this machine: its port file (--port-file), its announcement."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pscommon.core.errors import InvalidRequestError
from pscommon.security.credentials import process_credentials
from pscommon.system.local_jobs import JobAnnouncement
from pscommon.system.small_files import is_special, remove_file, replace_file
from pscommon.telemetry.logs import get_logger

log = get_logger(__name__)


class PortFile:
    """Writes and removes the file; does nothing without a path."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, address: str, inherited: bool) -> None:
        """Write the port. A pipe is written by a thread: it may never be read.

        Args:
            inherited: A promoted standby writes it: an error is logged, because its state exists
                nowhere else.

        Raises:
            InvalidRequestError: The file cannot be written.
        """
        path, text = self._path, address.rpartition(":")[2] + "\n"
        if path is None:
            return
        try:
            if is_special(path):
                threading.Thread(
                    target=_write_pipe, args=(path, text), name="port-file", daemon=True
                ).start()
            else:
                replace_file(path, text)
        except OSError as error:
            problem = f"--port-file {path} cannot be written: {error.strerror}"
            if not inherited:
                raise InvalidRequestError(problem) from error
            log.error("port_file_unwritable", problem=problem)

    def remove(self) -> None:
        """Remove the file; ignore errors, because this process ends."""
        if self._path is not None:
            with suppress(OSError):
                remove_file(self._path)


def announce(job: str, address: str, shard: int) -> Callable[[], object]:
    """Let commands of this user on this machine find the job without an address.

    They find the token for each of the job's addresses: so a shard other than 0 with tokens is
    announced too. Returns a function that ends the announcement.
    """
    tokens = process_credentials().tokens
    if shard and tokens is None:
        return lambda: None
    role, token = min(tokens(), key=lambda each: each[0] != "admin") if tokens else ("", "")
    try:
        return JobAnnouncement(job, address, role, token, shard).remove
    except OSError as error:
        log.warning("job_not_announced", problem=str(error), remedy="give commands --ps")
        return lambda: None


def _write_pipe(pipe: Path, text: str) -> None:
    with suppress(OSError):  # the reader may have closed the pipe
        replace_file(pipe, text)
