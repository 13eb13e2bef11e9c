"""Killed processes, power cuts and full disks: real ones where possible, else a simulated disk."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import pytest

from pscommon.wal.log import Fsync, LogFiles, WriteAheadLog
from tests.support.record_log_cases import Row, append, begin, readable, row, stored

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "common")}

# Appends numbered records until it is killed, begins a segment after every 40th, and prints each
# appended number.
ENDLESS = """
import itertools, sys
from pathlib import Path
from pscommon.wal.log import WriteAheadLog

log = WriteAheadLog(Path(sys.argv[1]), sys.argv[2])
first = int(sys.argv[3])
for number in itertools.count(first):
    if number == first or number % 40 == 0:
        log.begin(f"{number:08}-{first:08}", [])  # the last process may have begun this number
        log.retire(f"{number - 100:08}")
    log.append(number, b"%d" % number, [bytes([number % 256]) * (number * 37 % 5000)])
    print(number, flush=True)
"""


def killed(folder: Path, fsync: Fsync, first: int, count: int) -> int:
    """Return the last number acknowledged before the process was killed, `count` or more after the
    first.
    """
    command = [sys.executable, "-c", ENDLESS, str(folder), fsync, str(first)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        lines = [process.stdout.readline() for _ in range(count)]
        process.kill()
        return int([*lines, *process.stdout][-1])


@pytest.mark.parametrize("fsync", get_args(Fsync))
def test_a_killed_process_loses_no_acknowledged_record(tmp_path: Path, fsync: Fsync) -> None:
    """Repeatedly; each process continues in the files of the last one."""
    first = 0
    for count in (1, 60, 130):
        acknowledged = killed(tmp_path, fsync, first, count)
        found = [record for rows, _ in stored(tmp_path).values() for record in rows]
        numbers = [record[0] for record in found]

        assert numbers[-1] in (acknowledged, acknowledged + 1)
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert numbers[0] <= max(0, acknowledged - 60)
        assert found == [(n, b"%d" % n, bytes([n % 256]) * (n * 37 % 5000)) for n in numbers]
        first = numbers[-1] + 1


class PowerCutError(Exception):
    """No operation is possible after this, not even cleaning up."""


class PowerCutDisk(LogFiles):
    """A disk whose power is cut at its `limit`-th operation; a write is then half complete. It
    remembers the content of each file and the names in each folder at their last sync.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._left = limit
        self._files: dict[int, int] = {}  # inode -> descriptor
        self._synced: dict[int, bytes] = {}
        self._names: dict[str, int] = {}

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise PowerCutError

    def make_folder(self, path: Path) -> None:
        self._count()
        super().make_folder(path)

    def open(self, path: Path) -> int:
        self._count()
        descriptor = super().open(path)
        if os.fstat(descriptor).st_ino not in self._files:
            self._files[os.fstat(descriptor).st_ino] = os.open(path, os.O_RDONLY)
        return descriptor

    def write(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if self._left == 0:
            raw = b"".join(views)
            os.pwrite(descriptor, raw[: len(raw) // 2], offset)
        self._count()
        return super().write(descriptor, views, offset)

    def sync(self, descriptor: int) -> None:
        self._count()
        inode = os.fstat(descriptor).st_ino
        self._synced[inode] = self._content(inode)

    def sync_folder(self, path: Path) -> None:
        self._count()
        if path == self._folder:
            self._names = self._current()

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)

    def leave(self, folder: Path, names_lost: bool, bytes_lost: bool) -> Path:
        """Fill a folder with the files that exist after the power cut."""
        folder.mkdir()
        for name, inode in (self._names if names_lost else self._current()).items():
            (folder / name).write_bytes(
                self._synced.get(inode, b"") if bytes_lost else self._content(inode)
            )
        return folder

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def _content(self, inode: int) -> bytes:
        return os.pread(self._files[inode], 1 << 20, 0)

    def _current(self) -> dict[str, int]:
        folder = self._folder
        return (
            {path.name: path.stat().st_ino for path in folder.iterdir()} if folder.exists() else {}
        )


class LogOwner:
    """Uses a log that rewrites every file, and knows which records must survive."""

    def __init__(self) -> None:
        self.tried: dict[str, list[Row]] = {}
        self.acknowledged: dict[str, int] = {}
        self.last_removed = ""  # no segment up to this one may exist

    def work(self, log: WriteAheadLog) -> None:
        for number in range(1, 5):
            self._begin(log, f"{number}", row(1))
            for other in range(3):
                self._append(log, f"{number}", row(other))
            self.acknowledged = {f"{number}": self.acknowledged[f"{number}"]}
            log.retire(f"{number}")
        self.acknowledged = {}
        log.clear()
        self.last_removed = "4"
        self._begin(log, "5", row(1), row(2))
        self._append(log, "5", row(3))

    def _begin(self, log: WriteAheadLog, name: str, *rows: Row) -> None:
        self.tried[name] = list(rows)
        begin(log, name, *rows)
        self.acknowledged[name] = len(rows)

    def _append(self, log: WriteAheadLog, name: str, added: Row) -> None:
        self.tried[name].append(added)
        append(log, added)
        self.acknowledged[name] += 1

    def check(self, folder: Path) -> None:
        log = WriteAheadLog(folder, "no")
        found = {name: readable(log, name) for name in log.segments()}
        assert set(self.acknowledged) <= set(found)
        assert all(name > self.last_removed for name in found)
        for name, (rows, end) in found.items():
            assert end != "damaged"
            assert rows == self.tried[name][: len(rows)]
            assert len(rows) >= self.acknowledged.get(name, 0)


def power_cuts(folder: Path) -> Iterator[tuple[LogOwner, PowerCutDisk]]:
    """Yield the disk after each operation, and after all of them."""
    for limit in range(1000):
        place = folder / str(limit)
        machine, owner = PowerCutDisk(place, limit), LogOwner()
        try:
            owner.work(WriteAheadLog(place, "always", machine))
        except PowerCutError:
            yield owner, machine
            machine.close()
        else:
            yield owner, machine
            machine.close()
            return


@pytest.mark.parametrize("names_lost", [False, True])
@pytest.mark.parametrize("bytes_lost", [False, True])
def test_a_power_cut_at_any_operation_loses_nothing(
    tmp_path: Path, names_lost: bool, bytes_lost: bool
) -> None:
    """Unsynced names and bytes are lost or present, each independently."""
    cuts = 0
    for owner, machine in power_cuts(tmp_path):
        owner.check(machine.leave(tmp_path / f"after-{cuts}", names_lost, bytes_lost))
        cuts += 1
    assert cuts > 60


# Fills the disk with a spare file of 1 MiB and another file of 1 MiB, then appends records.
FULL = """
import errno, sys
from pathlib import Path
from pscommon.wal.log import LogWriteError, WriteAheadLog

folder = Path(sys.argv[1])
log = WriteAheadLog(folder / "log", "everysec")
log.begin("1", [(1, b"first", [bytes(1 << 20)])])
log.begin("2", [])
log.retire("2")
try:
    with (folder / "other").open("wb", buffering=0) as other:
        while other.write(bytes(4096)):
            pass
except OSError as error:
    assert error.errno == errno.ENOSPC
failed = 0
try:
    for number in range(100):
        log.append(number, b"new", [bytes(4096)])
except LogWriteError as error:
    assert error.errno == errno.ENOSPC, error
    failed = number
log.begin("3", [(number, b"spare", [bytes(4096)]) for number in range(200)])
log.close()
(folder / "other").unlink()
rows = [record[:2] for record in log.read("2")]
assert rows == [(number, b"new") for number in range(failed)], rows
reader = log.read("3")
assert [record[:2] for record in reader] == [(number, b"spare") for number in range(200)]
assert not reader.torn
"""


def test_a_spare_file_allows_a_new_segment_on_a_full_disk(tmp_path: Path) -> None:
    """On a private tmpfs."""
    mount = 'mount -t tmpfs -o size=2m none "$0"'
    unshare = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run(
        [*unshare, mount, str(tmp_path)], capture_output=True, timeout=60, check=False
    ).returncode:
        pytest.skip("this user may not mount a tmpfs in a mount namespace of its own")
    command = [*unshare, f'{mount} && exec "$1" -c "$2" "$0"', str(tmp_path), sys.executable, FULL]
    done = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr


LIMITED = """
import resource, sys
from pathlib import Path
from pscommon.wal.log import LogWriteError, WriteAheadLog

log = WriteAheadLog(Path(sys.argv[1]), "always")
log.begin("1", [])
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    for number in range(100):
        log.append(number, b"", [bytes(900)])
except LogWriteError as error:
    print(number, error.errno)
"""


def test_a_truncated_write_is_an_error(tmp_path: Path) -> None:
    """In a child process: the limit applies to every file of a process."""
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.stdout == f"5 {errno.EFBIG}\n", done.stderr
    rows, torn = stored(tmp_path)["1"]
    assert ([kind for kind, _, _ in rows], torn) == ([0, 1, 2, 3, 4], True)
