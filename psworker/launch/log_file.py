"""Log file of a process that survives disk errors."""

from collections.abc import Callable
from pathlib import Path


class LogFile:
    """File that loses lines instead of failing on a disk error.

    The first of consecutive errors is reported. The file is opened for each write, so a rotated
    file is created again.
    """

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        """Make the log; `report` is called with a text about an error."""
        self._path, self._report = path, report
        self._is_failing = False

    def write(self, data: bytes) -> None:
        """Append to the file."""
        try:
            with self._path.open("ab") as file:
                file.write(data)
        except OSError as error:
            if not self._is_failing:
                self._report(
                    f"{self._path} cannot be written: {error.strerror}; "
                    f"the process continues without its log"
                )
            self._is_failing = True
        else:
            self._is_failing = False
