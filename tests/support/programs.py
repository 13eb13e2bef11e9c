"""The commands as users start them: real processes, whose lines are read as they come, and which
end with the test.
"""

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

LIMIT = 60.0
BIN = Path(sys.executable).parent

Stream = Literal["stdout", "stderr"]


class Program:
    """One process. Its output is kept, and `wait_for` waits until it has said something."""

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
        """What it has written to stdout so far."""
        return self._text("stdout")

    @property
    def err(self) -> str:
        return self._text("stderr")

    @property
    def output(self) -> str:
        """Both streams."""
        return self.out + self.err

    def wait_for(self, text: str, times: int = 1, seconds: float = LIMIT) -> str:
        """The line that says it for the `times`-th time; AssertionError if it ends or says
        nothing before.
        """

        def found() -> list[str]:
            return [line for _, line in self._lines if text in line][times - 1 :]

        with self._changed:
            self._changed.wait_for(lambda: found() or not self._open, seconds)
            assert found(), f"{self} did not say {text!r} {times} times, only:\n{self.output}"
            return found()[0]

    def wait(self, seconds: float = LIMIT) -> int:
        """Its exit code, once all of its output is here."""
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
        """To another than the main thread, which the system is free to choose for any signal."""
        threads = {int(entry.name) for entry in Path(f"/proc/{self.pid}/task").iterdir()} - {
            self.pid
        }
        tgkill = ctypes.CDLL(None, use_errno=True).tgkill
        assert tgkill(self.pid, min(threads), number) == 0, os.strerror(ctypes.get_errno())

    def end(self) -> None:
        """Whatever state it is in."""
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
        with suppress(ValueError):  # closed by end() while a grandchild still held the pipe
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
    """Starts commands in `folder`, with a TMPDIR of their own (`temporary`) and without settings
    from around us.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # short: a DataLoader's processes make sockets there, whose names may have 107 bytes
        self.temporary = Path(tempfile.mkdtemp(prefix="ps-"))
        self._started: list[Program] = []

    def start(self, command: str, *args: object, **environment: object) -> Program:
        """`command` is ps-run, ps-server, ps-worker, ps-ctl or python."""
        line = [str(BIN / command), *map(str, args)]
        process = subprocess.Popen(
            line,
            cwd=self.folder,
            env=self._environment(environment),
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return self._kept(Program(line, process))

    def fork(self, command: str, *args: object, **environment: object) -> Program:
        """As `start`, but it starts in a moment: for tests of what ps-server, ps-worker and
        scripts do, not of how they start."""
        line = [command, *map(str, args)]
        return self._kept(
            Program(line, Forked(line[0], line[1:], self.folder, self._environment(environment)))
        )

    def _environment(self, chosen: dict[str, object]) -> dict[str, str]:
        around = {name: value for name, value in os.environ.items() if not name.startswith("PS_")}
        own = {"TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        # or torch leaves it in TMPDIR
        own["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "inductor")
        return around | own | {name: str(value) for name, value in chosen.items()}

    def _kept(self, program: Program) -> Program:
        self._started.append(program)
        return program

    def run(self, command: str, *args: object, **environment: object) -> Program:
        """Starts it and waits for its end."""
        program = self.start(command, *args, **environment)
        program.wait()
        return program

    @property
    def alive(self) -> list[int]:
        """Processes that were started here, by whomever: they are still in the folder."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):  # it has ended
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
    """Of a process that runs, from /proc: children, their children, and so on."""
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
    """Waits until a process has ended; False if it does not want to."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], LIMIT)[0])
    finally:
        os.close(handle)
