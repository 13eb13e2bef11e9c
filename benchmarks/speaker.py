"""A process that does a piece of work when told to, and says how it went. Both ends of the talk
are here.

They talk in lines: the process prints "ready" once warm, reads a word, works, prints its
measurements as JSON. So contenders can take turns, and whatever else the machine does meets all
of them alike. Only the standard library is used here: a contender may live in an environment
that has none of ours.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks import processes

ROOT = Path(__file__).resolve().parents[1]
ORPHAN_GUARD = ROOT / "psworker/supervision/orphan_guard.py"
STOP_SECONDS = 60.0

Measurements = dict[str, float]
"""By name: "seconds" of one piece of work, "count" of pieces in this turn (1 where it is
missing), and others.
"""


@dataclass(frozen=True)
class Command:
    """`python -m module *args`, perhaps behind a prefix such as ("ip", "netns", "exec", NAME)."""

    module: str
    args: tuple[str, ...] = ()
    python: str = sys.executable
    prefix: tuple[str, ...] = ()

    def line(self) -> list[str]:
        return [*self.prefix, self.python, "-m", self.module, *self.args]


def guarded(line: Sequence[str]) -> list[str]:
    """The same command, which ends with the process that starts it, however that ends."""
    # -I -S: the guard loads nothing; it then becomes the command
    return [sys.executable, "-I", "-S", str(ORPHAN_GUARD), str(os.getpid()), *line]


class Speaker:
    """Runs a command for as long as a `with` lasts; it ends with this process, however that
    ends.

    Starts when it is made, so that several can warm up at once. RuntimeError where it says the
    wrong thing or ends.
    """

    def __init__(self, command: Command) -> None:
        self._name = " ".join(command.line()[-3:])
        self._frozen: list[int] = []
        self._process = subprocess.Popen(
            guarded(command.line()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=_environment(),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> "Speaker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Hangs up, which tells the process to end, and sees to it that it does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.thaw()
        self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def wait_until_ready(self) -> None:
        line = self._read()
        if line != "ready":
            raise RuntimeError(f"{self._name} said {line!r} instead of 'ready'")

    def freeze(self) -> None:
        """Stop all its processes, until `thaw`: it has no turn, and may not use what others are
        measured with.
        """
        self._frozen = processes.family(self.pid)
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)
        self._frozen = []

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def hear(self) -> Measurements:
        """What came of the word that it was told last."""
        measured: Measurements = json.loads(self._read())
        return measured

    def ask(self, word: str) -> Measurements:
        self.tell(word)
        return self.hear()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} ended with exit code {self._process.wait()}")
        return line.strip()


class Team:
    """Processes that do a piece of work together: all are told at once."""

    def __init__(self, members: Sequence[Speaker]) -> None:
        self.members = members
        for member in members:
            member.wait_until_ready()

    def go(self, word: str = "go") -> Measurements:
        """What member 0 measured; "seconds" are those of the slowest."""
        for member in self.members:
            member.tell(word)
        answers = [member.hear() for member in self.members]
        return {**answers[0], "seconds": max(measured["seconds"] for measured in answers)}


def serve(works: Mapping[str, Callable[[], Measurements]], warm_up: int = 0) -> None:
    """The process's main loop: does `works[word]` for each word, until the other side hangs up.

    warm_up: how often each is done before the word "ready"; 0 where the parts of this contender
    warm up themselves.
    """
    for work in works.values():
        for _ in range(warm_up):
            work()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(works[line.strip()]()), flush=True)


def _environment() -> dict[str, str]:
    """Peers stay on the loopback interface, and no setting of the caller's reaches ours. What
    pscommon has set for gRPC holds for every contender that uses gRPC, TensorFlow among them."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PS_")}
    return {**variables, "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
