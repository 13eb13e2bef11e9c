"""Commands as users start them: real processes whose output is read and which end with the test."""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from tests.support.fork_server import Forked
from tests.support.protection import protection_of

LIMIT = 60.0
BIN = Path(sys.executable).parent

Stream = Literal["stdout", "stderr"]


class Program:
    """One process with its recorded output."""

    def __init__(self, command: Sequence[str], process: subprocess.Popen[str] | Forked) -> None:
        self.command = list(command)
        self.process = process
        self._changed = threading.Condition()
        self._lines: list[tuple[Stream, str]] = []
        self._open = 2
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in ("stdout", "stderr")
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def out(self) -> str:
        """Output to stdout so far."""
        return self._text("stdout")

    @property
    def err(self) -> str:
        return self._text("stderr")

    @property
    def output(self) -> str:
        """Output of both streams."""
        return self.out + self.err

    def wait_for(self, text: str, times: int = 1, seconds: float = LIMIT) -> str:
        """Return the `times`-th line that contains the text; AssertionError if the process exits
        before.
        """

        def found() -> list[str]:
            return [line for _, line in self._lines if text in line][times - 1 :]

        with self._changed:
            self._changed.wait_for(lambda: found() or not self._open, seconds)
            assert found(), f"{self} did not say {text!r} {times} times, only:\n{self.output}"
            return found()[0]

    def wait(self, seconds: float = LIMIT) -> int:
        """Return the exit code when all output has been read."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self} did not end; it said:\n{self.output}") from None
        for reader in self._readers:
            reader.join(LIMIT)
        return code

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def send_beside_main(self, number: signal.Signals) -> None:
        """Send a signal to another thread than the main one, as the system may do."""
        threads = {int(entry.name) for entry in Path(f"/proc/{self.pid}/task").iterdir()} - {
            self.pid
        }
        tgkill = ctypes.CDLL(None, use_errno=True).tgkill
        assert tgkill(self.pid, min(threads), number) == 0, os.strerror(ctypes.get_errno())

    def end(self) -> None:
        """Kill the process in any state."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def _text(self, stream: Stream) -> str:
        with self._changed:
            return "".join(line for of, line in self._lines if of == stream)

    def _read(self, stream: Stream) -> None:
        with suppress(ValueError):  # closed by end() while a grandchild has the pipe
            for line in getattr(self.process, stream):
                with self._changed:
                    self._lines.append((stream, line))
                    self._changed.notify_all()
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def __str__(self) -> str:
        return f"{Path(self.command[0]).name} {' '.join(self.command[1:])}"


class Programs:
    """Starts commands in `folder` with their own TMPDIR (`temporary`).

    Of the variables PS_ they have only those of `protection_of`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # short: sockets of DataLoader processes are created there, and their paths are limited to
        # 107 bytes
        self.temporary = Path(tempfile.mkdtemp(prefix="ps-"))
        self._started: list[Program] = []

    def start(self, command: str, *args: object, **environment: object) -> Program:
        """Start ps-run, ps-server, ps-worker, ps-ctl or python."""
        line = [str(BIN / command), *map(str, args)]
        process = subprocess.Popen(
            line,
            cwd=self.folder,
            env=self._environment(line, environment),
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return self._add(Program(line, process))

    def fork(self, command: str, *args: object, **environment: object) -> Program:
        """Start a process faster than `start`, by a fork; not for tests of starting commands."""
        line = [command, *map(str, args)]
        return self._add(
            Program(
                line, Forked(line[0], line[1:], self.folder, self._environment(line, environment))
            )
        )

    def _environment(self, line: Sequence[str], chosen: dict[str, object]) -> dict[str, str]:
        around = {name: value for name, value in os.environ.items() if not name.startswith("PS_")}
        own = {"TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        # otherwise torch creates it in TMPDIR
        own["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "inductor")
        # also behind another program, such as unshare
        ours = (name for word in line if (name := Path(word).name) in ("ps-server", "ps-ctl"))
        own |= protection_of(next(ours, "ps-worker"))
        return around | own | {name: str(value) for name, value in chosen.items()}

    def _add(self, program: Program) -> Program:
        self._started.append(program)
        return program

    def run(self, command: str, *args: object, **environment: object) -> Program:
        """Start a command and wait for its exit."""
        program = self.start(command, *args, **environment)
        program.wait()
        return program

    @property
    def alive(self) -> list[int]:
        """PIDs of all processes in the folder, including descendants."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):  # the process has ended
                    if (entry / "cwd").readlink() == self.folder.resolve():
                        found.append(int(entry.name))
        return found

    def script(self, code: str, name: str = "train.py") -> Path:
        path = self.folder / name
        path.write_text(code)
        return path

    def close(self) -> None:
        for program in self._started:
            program.end()
        shutil.rmtree(self.temporary)


@contextmanager
def programs_in(folder: Path) -> Iterator[Programs]:
    programs = Programs(folder)
    try:
        yield programs
    finally:
        programs.close()


def descendants(pid: int) -> list[int]:
    """Return children, grandchildren and so on of a running process, from /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                # the name in brackets may hold spaces; the parent is the second field after it
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
    found, wave = [], [pid]
    while wave:
        wave = [child for child, parent in parents.items() if parent in wave]
        found += wave
    return found


def wait_for_exit(pid: int) -> bool:
    """Wait until a process has exited; False on timeout."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], LIMIT)[0])
    finally:
        os.close(handle)
