"""Actions of the supervisor of ps-run, which the launcher carries out."""

from dataclasses import dataclass

from psworker.launch.outcome import RunOutcome


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
