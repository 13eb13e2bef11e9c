"""What a process says, kept in a file as long as the disk takes it."""

from collections.abc import Callable
from pathlib import Path


class LogFile:
    """A disk that refuses costs lines of a file, not the run: `tell` hears of it once, and what
    comes later is tried again. It is opened for each write, so one that somebody has moved away
    is made anew."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self._path, self._tell = path, tell
        self._told = False

    def write(self, data: bytes) -> None:
        """Behind what is there."""
        try:
            with self._path.open("ab") as file:
                file.write(data)
        except OSError as error:
            if not self._told:
                self._tell(
                    f"{self._path} cannot be written: {error.strerror}; this process goes on "
                    f"without"
                )
            self._told = True
        else:
            self._told = False
