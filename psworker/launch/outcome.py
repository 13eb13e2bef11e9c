"""How a process, or the whole run, has ended: codes, what they mean, and which of them are worth
another try.
"""

import signal
from dataclasses import dataclass
from typing import Literal

from pscommon.core.exit_codes import EXPLANATIONS, ExitCode

Status = Literal["done", "failed", "interrupted"]

# What a second start may heal: servers that were unreachable, workers that were late, a container's
# kill.
RETRYABLE = frozenset(
    {ExitCode.UNREACHABLE, ExitCode.TOO_FEW_WORKERS, 128 + signal.SIGKILL, 128 + signal.SIGTERM}
)

SIGNALS = frozenset(signal.Signals)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended; `code` is what ps-run exits with. `culprit` names the process that failed
    first, where one did.

    `culprit_code` is its exit code, negative for a signal, None where it failed without ending.
    `earlier` tells what happened before, one sentence each.
    """

    status: Status
    code: int = 0
    culprit: str = ""
    culprit_code: int | None = None
    reason: str = ""
    earlier: tuple[str, ...] = ()


def is_retryable(code: int) -> bool:
    """True for a death by signal (negative code) and for the exit codes that another try may
    heal.
    """
    return code < 0 or code in RETRYABLE


def exit_status(code: int) -> int:
    """The exit code that a shell would show: 128 + n for signal n."""
    return 128 - code if code < 0 else code


def describe(code: int) -> str:
    """'was killed by SIGKILL', 'exited with 10: a port or data directory is taken'."""
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    if code in set(ExitCode):
        return f"exited with {code}: {EXPLANATIONS[ExitCode(code)][0]}"
    return f"exited with {code}" + (
        f": as if killed by {signal_name(code - 128)}" if code - 128 in SIGNALS else ""
    )


def signal_name(number: int) -> str:
    """'SIGKILL' for 9; 'signal 99' for one that has no name here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
