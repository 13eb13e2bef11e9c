"""What happens to ps-run (events) and what it does about it (actions)."""

from dataclasses import dataclass

from psworker.launch.outcome import RunOutcome

# Events


@dataclass(frozen=True, slots=True)
class ServerBound:
    """A server listens."""

    name: str


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """A process ended by itself or otherwise; code is negative for a signal.

    successor: address of the server that has its place in the job, where there is one: the
    standby of somebody.
    """

    name: str
    code: int
    successor: str = ""


@dataclass(frozen=True, slots=True)
class WorkerHung:
    """A worker has lost its place because its script makes no call (--progress-timeout); its
    process still runs.
    """

    name: str


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """ps-run itself got a signal."""

    number: int


@dataclass(frozen=True, slots=True)
class ResultCollected:
    """The result has been read from the servers, or could not be.

    undone: what of the training it lacks, in words. idle: why no step was counted, in words,
    where that is certain.
    """

    undone: str = ""
    idle: str = ""


@dataclass(frozen=True, slots=True)
class StopAnswered:
    """The servers were asked to stop; `problem` is not empty if that failed."""

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
    """SIGTERM."""

    name: str


@dataclass(frozen=True, slots=True)
class KillProcess:
    """SIGKILL, with everything that the process started."""

    name: str


@dataclass(frozen=True, slots=True)
class CollectResult:
    """Read the result from the servers; answered by Collected."""


@dataclass(frozen=True, slots=True)
class StopJob:
    """Ask the servers to stop; answered by StopAnswered."""


@dataclass(frozen=True, slots=True)
class ShowMessage:
    """Tell the user."""

    text: str


@dataclass(frozen=True, slots=True)
class FinishRun:
    """Nothing runs any more."""

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
