"""One contender: a process that does a piece of work when told to, and says how long it took.

The driver and its contenders talk in lines: a contender prints "ready" once warm, reads "go", works, prints seconds.
So contenders can take turns, and whatever else the machine does meets all of them alike.
"""

import subprocess
import sys
from collections.abc import Callable
from types import TracebackType


class Contender:
    """`module` run as `python -m module *args`, in use as a context manager."""

    def __init__(self, name: str, module: str, *args: object) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "Contender":
        self._expect("ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def measure(self) -> float:
        """Seconds of one piece of work."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(self._read())

    def _expect(self, word: str) -> None:
        line = self._read()
        if line != word:
            raise RuntimeError(f"{self.name} said {line!r} instead of {word!r}")

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()}")
        return line.strip()


def serve(work: Callable[[], float], warm_up: int = 3) -> None:
    """A contender's main loop: `work` does the piece once and returns its seconds."""
    for _ in range(warm_up):
        work()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(work(), flush=True)
