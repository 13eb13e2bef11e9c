"""The file in which a server says at which port it listens (--port-file)."""

import logging
import threading
from contextlib import suppress
from pathlib import Path

from pscommon.core.errors import InvalidRequestError
from pscommon.system.small_files import is_special, remove_whole, write_whole

log = logging.getLogger("psserver")


class PortFile:
    """path: None where nobody wants to know."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, address: str, inherited: bool) -> None:
        """InvalidRequestError where that fails; but what a standby has that takes over
        (inherited) nobody else has. A pipe may never find a reader: nobody waits for it."""
        path, text = self._path, address.rpartition(":")[2] + "\n"
        if path is None:
            return
        try:
            if is_special(path):
                threading.Thread(
                    target=_tell_reader, args=(path, text), name="port-file", daemon=True
                ).start()
            else:
                write_whole(path, text)
        except OSError as error:
            problem = f"--port-file {path} cannot be written: {error.strerror}"
            if not inherited:
                raise InvalidRequestError(problem) from error
            log.error("going on without a port file", extra={"problem": problem})

    def remove(self) -> None:
        """Where it has to stay, this process ends all the same."""
        if self._path is not None:
            with suppress(OSError):
                remove_whole(self._path)


def _tell_reader(pipe: Path, text: str) -> None:
    with suppress(OSError):  # one that has hung up does not need it
        write_whole(pipe, text)
