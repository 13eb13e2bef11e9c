"""Commands on a terminal: a pseudo-terminal is their keyboard and screen."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from contextlib import suppress
from pathlib import Path

from tests.support.programs import BIN, LIMIT
from tests.support.protection import protection_of

ROWS, COLUMNS = 24, 80
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A command in a session of its own whose terminal a test reads and writes."""

    def __init__(self, folder: Path, command: str, *arguments: str) -> None:
        self.text = ""
        self._seen = 0
        line = [str(BIN / command), *arguments]
        environment = {key: value for key, value in os.environ.items() if key[:3] != "PS_"}
        environment |= protection_of(command)
        environment |= {"TMPDIR": str(folder), "TERM": "xterm", "NO_COLOR": "1"}
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execve(line[0], line, environment)
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("4H", ROWS, COLUMNS, 0, 0))

    def wait_for(self, text: str) -> str:
        """Return the output up to this text, after the text of the last call."""
        deadline = time.monotonic() + LIMIT
        while text not in (new := CONTROL.sub("", self.text)[self._seen :]):
            assert select.select([self._file], [], [], max(0.0, deadline - time.monotonic()))[0], (
                f"no {text!r} in:\n{new}"
            )
            self.text += os.read(self._file, 1 << 16).decode()
        end = new.index(text) + len(text)
        self._seen += end
        return new[:end]

    def enter(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())

    def press_ctrl_c(self) -> None:
        os.write(self._file, b"\x03")

    def exit_code(self) -> int:
        with suppress(OSError):  # EIO: all its processes have closed the terminal
            while data := os.read(self._file, 1 << 16):
                self.text += data.decode()
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return code

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._file)
