"""What ps-run's supervisor decides: its actions, the outcome of the run, and texts about exits."""

import signal
from dataclasses import dataclass
from typing import Literal

from pscommon.core.exit_codes import EXPLANATIONS, ExitCode

Status = Literal["done", "failed", "interrupted"]

# a restart may help: unreachable servers, late workers, a killed container
RETRYABLE = frozenset(
    {ExitCode.UNREACHABLE, ExitCode.TOO_FEW_WORKERS, 128 + signal.SIGKILL, 128 + signal.SIGTERM}
)

SIGNALS = frozenset(signal.Signals)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        status: "done", "failed" or "interrupted".
        code: exit code of ps-run.
        culprit: process that failed first; empty if none did.
        culprit_code: its exit code, negative for a signal; None if it failed without exiting.
        reason: text about the end.
        earlier: texts about earlier restarts.
    """

    status: Status
    code: int = 0
    culprit: str = ""
    culprit_code: int | None = None
    reason: str = ""
    earlier: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start this process; attempt 0 is the first."""

    name: str
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class TerminateProcess:
    """Send SIGTERM to this process."""

    name: str


@dataclass(frozen=True, slots=True)
class KillProcess:
    """Send SIGKILL to this process and its children."""

    name: str


@dataclass(frozen=True, slots=True)
class CollectResult:
    """Read the result from the servers; `Supervisor.collected` follows."""


@dataclass(frozen=True, slots=True)
class StopJob:
    """Ask the servers to stop; `Supervisor.stop_answered` follows."""


@dataclass(frozen=True, slots=True)
class ShowMessage:
    """Show a message to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class FinishRun:
    """All processes have ended."""

    outcome: RunOutcome


Action = (
    StartProcess
    | TerminateProcess
    | KillProcess
    | CollectResult
    | StopJob
    | ShowMessage
    | FinishRun
)


def is_retryable(code: int) -> bool:
    """Return whether a restart may help: after a signal (negative code) or a retryable code."""
    return code < 0 or code in RETRYABLE


def exit_status(code: int) -> int:
    """Return the exit code as a shell shows it: 128 + n for signal n."""
    return 128 - code if code < 0 else code


def describe(code: int) -> str:
    """Describe an exit: 'was killed by SIGKILL', 'exited with 10: a port ... is taken'."""
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    if code in set(ExitCode):
        return f"exited with {code}: {EXPLANATIONS[ExitCode(code)][0]}"
    return f"exited with {code}" + (
        f": as if killed by {signal_name(code - 128)}" if code - 128 in SIGNALS else ""
    )


def signal_name(number: int) -> str:
    """Return 'SIGKILL' for 9; 'signal 99' for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
