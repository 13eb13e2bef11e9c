"""The processes of a run: started in sessions of their own, their output followed line by line,
ended for certain.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pscommon.system.process_id import process_id
from psworker.launch import orphan_guard as tether
from psworker.launch.log_file import LogFile

Stream = Literal["stdout", "stderr"]
OnLine = Callable[[str, Stream, str], None]
OnExit = Callable[["ManagedProcess", int], None]

TAIL_LINES = 20
LONGEST_LINE = 64 << 10
POLL_SECONDS = 0.1
DRAIN_SECONDS = 1.0


class LineSplitter:
    """Cuts a stream of bytes into lines. Of a line that rewrites itself (a progress bar) the
    last state counts.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that are complete now."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            whole.append(self._rest)
            self._rest = b""
        return [_text(line) for line in whole]

    def flush(self) -> list[str]:
        """What is left at the end, if anything."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode("utf-8", "replace")


def spawn(
    command: Sequence[str], environment: Mapping[str, str], stdin: int
) -> "subprocess.Popen[bytes]":
    """A process in a session of its own. Call it from the main thread: on Linux it ends with the
    one that calls.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *command],
        env=dict(environment),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


class ManagedProcess:
    """A started process. Its output goes to `log` (bytes as they are) and to `on_line`;
    `on_exit` is called at last.

    Start it from the main thread, as `spawn` says. Both callbacks are called from a thread of
    this object. `tail` holds the last lines, `traceback` what the script raised, `identity` the
    name of the process (`pscommon.system.process_id`). spawned: the process, where it was
    started ahead.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        traceback_file: Path,
        on_line: OnLine,
        on_exit: OnExit,
        spawned: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        self.name = name
        self.log = log
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.traceback: list[str] = []
        self._traceback_file = traceback_file
        self._on_line = on_line
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._swept = False
        self._process = spawned or spawn(command, environment, subprocess.DEVNULL)
        self.identity = process_id(
            self._process.pid
        )  # before anybody waits for it: then the number is not used again
        self._thread = threading.Thread(target=self._follow, name=f"follow-{name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Also the process group that everything it starts belongs to."""
        return self._process.pid

    def terminate(self) -> None:
        """SIGTERM to the process itself, which then ends what it has started."""
        with self._lock:
            if self._process.poll() is None:
                self._process.terminate()

    def resume(self) -> None:
        """SIGCONT: a process that was stopped (SIGSTOP) handles no SIGTERM."""
        with self._lock:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to the process and to everything that it has started."""
        with self._lock:
            if self._process.poll() is None:
                self._kill_group()

    def join(self) -> None:
        """Waits until its output has been read and on_exit been called."""
        self._thread.join()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _follow(self) -> None:
        """Always ends with on_exit. If the output cannot be followed, the process does not go
        on.
        """
        log = LogFile(self.log, lambda problem: self._tell("stderr", [problem]))
        try:
            with selectors.DefaultSelector() as selector:
                for stream in ("stdout", "stderr"):
                    selector.register(
                        getattr(self._process, stream),
                        selectors.EVENT_READ,
                        (stream, LineSplitter()),
                    )
                self._read(selector, log)
                self._process.wait()
                self._take_traceback(log)
        except OSError as error:
            self.tail.append(str(error))
        finally:
            self.kill()
            code = self._process.wait()
            self._sweep()
            for pipe in (self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
            self._on_exit(self, code)

    def _read(self, selector: selectors.BaseSelector, log: LogFile) -> None:
        """Until both streams end; those of an ended process whose children hold them open, for a
        moment more.
        """
        until = float("inf")
        while selector.get_map() and time.monotonic() < until:
            for key, _ in selector.select(POLL_SECONDS):
                stream, lines = key.data
                data = os.read(key.fd, 1 << 16)
                log.write(data)
                self._tell(stream, lines.feed(data) if data else lines.flush())
                if not data:
                    selector.unregister(key.fileobj)
            if until == float("inf") and self._ended():
                until = time.monotonic() + DRAIN_SECONDS
        for key in list(selector.get_map().values()):
            self._tell(key.data[0], key.data[1].flush())

    def _ended(self) -> bool:
        """True once the process is gone; what it has left behind is killed then."""
        with self._lock:
            if self._process.poll() is None:
                return False
        self._sweep()
        return True

    def _sweep(self) -> None:
        """Once, right after the end: later the number could be another group's."""
        if not self._swept:
            self._swept = True
            self._kill_group()

    def _tell(self, stream: Stream, lines: Sequence[str]) -> None:
        for line in lines:
            self.tail.append(line)
            self._on_line(self.name, stream, line)

    def _take_traceback(self, log: LogFile) -> None:
        """Moves what the script raised into the log; nobody has seen it yet."""
        if self._traceback_file.exists():
            text = self._traceback_file.read_text(encoding="utf-8", errors="replace")
            self._traceback_file.unlink()
            log.write(text.encode())
            self.traceback = text.splitlines()
