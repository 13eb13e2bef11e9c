"""Transcripts of ps-run's supervisor: events and actions as text."""

from collections.abc import Callable
from functools import partial

from psworker.supervision.decisions import (
    Action,
    CollectResult,
    FinishRun,
    KillProcess,
    RunOutcome,
    ShowMessage,
    StartProcess,
    StopJob,
    TerminateProcess,
)
from psworker.supervision.supervisor import Supervisor

STARTED = """
begin        | start s0
bound s0     | start s1, start w0, start w1
bound s1     |
"""


def play(transcript: str, *, durable: bool) -> RunOutcome | None:
    """Check that the events on the left cause the actions on the right.

    Return the outcome of the run, if there is one.
    """
    machine = Supervisor(2, 2, max_restarts=2, durable=durable, grace=5.0)
    now, outcome = 1000.0, None
    for line in transcript.strip().splitlines():
        if not line:
            continue
        what, expected = (part.strip() for part in line.split("|"))
        if what.startswith("after"):
            now += float(what.split()[1])
        actions = machine.start(now) if what == "begin" else event(machine, what)(now)

        assert ", ".join(map(show, actions)) == expected, f"after {what!r}"

        outcome = next(
            (action.outcome for action in actions if isinstance(action, FinishRun)), outcome
        )
    return outcome


def event(machine: Supervisor, text: str) -> Callable[[float], list[Action]]:
    match text.split():
        case ["bound", name]:
            return partial(machine.bound, name)
        case ["exit", name, code, *successor]:
            return partial(machine.exited, name, int(code), "".join(successor))
        case ["signal", number]:
            return partial(machine.signalled, int(number))
        case ["wanted", count, *leaving]:
            return partial(machine.wanted, int(count), leaving)
        case ["collected"]:
            return partial(machine.collected, "", "")
        case ["rolled", "back"]:
            return partial(machine.collected, "the servers rolled back", "")
        case ["stop", answer]:
            return partial(machine.stop_answered, "" if answer == "ok" else answer)
        case ["after", _]:
            return machine.tick
    raise ValueError(text)


def show(action: Action) -> str:
    match action:
        case StartProcess(name, attempt):
            return f"start {name}" + (" again" if attempt else "")
        case TerminateProcess(name):
            return f"term {name}"
        case KillProcess(name):
            return f"kill {name}"
        case CollectResult():
            return "collect"
        case StopJob():
            return "stop job"
        case ShowMessage():
            return "message"
        case FinishRun(outcome):
            return f"finish {outcome.status} {outcome.code} {outcome.culprit}".strip()
