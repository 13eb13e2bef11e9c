"""The number of starts of a job's servers, on disk so that no worker number is given twice.

The file holds two slots of SLOT_BYTES, each `NUMBER CRC32` padded with spaces. A start overwrites
the slot that does not hold the newest number, in place: that needs no disk space, and a torn
write leaves the other slot. Earlier versions wrote the number alone; it is read, and replaced by
two slots.
"""

import contextlib
import os
import zlib
from pathlib import Path

from pscommon.core.errors import SnapshotError
from pscommon.snapshot.atomic_files import AtomicFiles, publish
from pscommon.telemetry.logs import get_logger

GENERATION = "generation"
"""Name of the file; every data directory of a shard 0 has one."""

SLOT_BYTES = 4096
"""A block of usual disks: writing one slot cannot damage the other."""

SAFE_START_NUMBER = 100_000
"""More starts than any job has had; for repairing a damaged file."""


log = get_logger(__name__)


class GenerationDamagedError(Exception):
    """No number can be read; the message names a remedy."""


class GenerationFile:
    """The counter of one data directory. Methods raise OSError where the disk fails."""

    def __init__(self, data_dir: Path, files: AtomicFiles | None = None) -> None:
        self.path = data_dir / GENERATION
        self._files = files or AtomicFiles()

    def count_up(self, least: int) -> int:
        """Store a number above all earlier ones.

        Args:
            least: The smallest number that it may be.

        Returns:
            The number, on the disk.

        Raises:
            GenerationDamagedError: No earlier number can be read.
            OSError: The disk refused; the earlier number still counts.
        """
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return self._create(least)
        if raw.strip().isdigit():  # written by earlier versions, or by an operator
            return self._create(max(least, int(raw) + 1))
        numbers = [_number_in(raw[:SLOT_BYTES]), _number_in(raw[SLOT_BYTES:])]
        known = [number for number in numbers if number is not None]
        if not known:
            raise GenerationDamagedError(
                f"{self.path} is damaged: it counts the starts of this job, and holds no valid "
                f"number. Try: echo {SAFE_START_NUMBER} > {self.path} (any number above the number "
                "of starts so far)"
            )
        newest = max(known)
        # a damaged slot may have held the number after the valid one
        number = max(least, newest + (1 if len(known) == 2 else 2))
        offset = 0 if numbers[0] != newest else SLOT_BYTES
        self._files.overwrite(self.path, offset, _slot(number))
        self._files.sync(self.path)
        return number

    def _create(self, number: int) -> int:
        """Replace the file by one with both slots written, so that their blocks are on the disk."""
        temporary = self.path.with_suffix(".tmp")
        self._files.write(temporary, _slot(number) * 2)
        publish(self._files, temporary, self.path)
        return number


class GenerationCounter:
    """Counts the starts of a job; on disk if there is a data directory.

    number: number of this start; -1 before the first.
    """

    def __init__(self, data_dir: Path | None) -> None:
        self.number = -1
        self._file = GenerationFile(data_dir) if data_dir is not None else None
        self._reserved = -1  # workers use numbers of generations up to this one
        self._is_unwritten = False

    @property
    def _next(self) -> int:
        return max(self.number, self._reserved) + 1

    def count(self, least: int = 0) -> None:
        """Count a start durably, so that no worker number is reused.

        Args:
            least: Smallest allowed number.

        Raises:
            SnapshotError: The number cannot be stored.
        """
        number = max(least, self._next)
        if self._file is not None:
            try:
                number = self._file.count_up(number)
            except GenerationDamagedError as error:
                raise SnapshotError(str(error)) from error
            except OSError as error:
                raise SnapshotError(
                    f"cannot count this start of the job in {self._file.path}: "
                    f"{remedy_for(error, self._file.path)}"
                ) from error
        self.number, self._is_unwritten = number, False

    def count_in_running_job(self, least: int = 0) -> None:
        """Count a start of a job that continues after a disk error.

        After an error the number is written with the next snapshot.
        """
        number = max(least, self._next)
        try:
            self.count(number)
        except SnapshotError as error:
            self.number, self._is_unwritten = number, True
            log.error("start_not_counted", problem=str(error))

    def reserve(self, number: int) -> None:
        """Skip this number at the next start: its worker numbers are in use."""
        if number < self._next:
            return
        self._reserved, self._is_unwritten = number, True
        self.write_again()
        if self._is_unwritten and self._file is not None:
            log.error("generation_not_reserved", generation=number)

    def write_again(self) -> None:
        """Write a number whose write failed."""
        if self._is_unwritten and self._file is not None:
            with contextlib.suppress(OSError, GenerationDamagedError):
                self._file.count_up(max(self.number, self._reserved))
                self._is_unwritten = False


def remedy_for(error: OSError, path: Path) -> str:
    """Return the error and a remedy for a disk that refuses the file."""
    remedy = f"free {2 * SLOT_BYTES} bytes in {path.parent}, and check its mode"
    return f"{os.strerror(error.errno or 0)}. Try: {remedy}"


def _slot(number: int) -> bytes:
    text = str(number)
    return f"{text} {zlib.crc32(text.encode()):08x}\n".encode().rjust(SLOT_BYTES)


def _number_in(slot: bytes) -> int | None:
    """Return the number of a slot; None if it is damaged."""
    words = slot.split()
    if len(slot) != SLOT_BYTES or len(words) != 2 or not words[0].isdigit():
        return None
    return int(words[0]) if words[1] == b"%08x" % zlib.crc32(words[0]) else None
