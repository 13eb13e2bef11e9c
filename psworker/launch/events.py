"""Events that the supervisor of ps-run receives, and actions that it returns."""

from dataclasses import dataclass

from psworker.launch.outcome import RunOutcome

# Events


@dataclass(frozen=True, slots=True)
class ServerBound:
    """A server has bound its port."""

    name: str


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """A process ended.

    Attributes:
        name: process that ended.
        code: exit code; negative for a signal.
        successor: address of the standby that replaced this server; empty without one.
    """

    name: str
    code: int
    successor: str = ""


@dataclass(frozen=True, slots=True)
class WorkerHung:
    """A worker was dropped because its script hung (--progress-timeout); its process runs."""

    name: str


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """ps-run received a signal."""

    number: int


@dataclass(frozen=True, slots=True)
class ResultCollected:
    """The result was read from the servers, or could not be read.

    Attributes:
        undone: text about training that a rollback has lost; empty if none.
        idle: why no step was counted; empty if one was, or if unknown.
    """

    undone: str = ""
    idle: str = ""


@dataclass(frozen=True, slots=True)
class StopAnswered:
    """The servers answered the request to stop; `problem` is not empty if it failed."""

    problem: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    ServerBound
    | ProcessExited
    | WorkerHung
    | SignalReceived
    | ResultCollected
    | StopAnswered
    | Tick
)


# Actions


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
    """Read the result from the servers; ResultCollected follows."""


@dataclass(frozen=True, slots=True)
class StopJob:
    """Ask the servers to stop; StopAnswered follows."""


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
