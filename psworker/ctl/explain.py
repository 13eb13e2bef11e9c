"""What an exit code or the reason of an error means, and what to do."""

import inspect
import signal
from typing import Any

import click

from pscommon.core.errors import REASONS, ReasonRow
from pscommon.core.exit_codes import EXPLANATIONS, ExitCode
from psworker.ctl.output import Table
from psworker.launch.outcome import signal_name
from psworker.session.drain import DrainedError

# what travels, and what only a worker itself says
ERRORS = REASONS | {
    "DRAINED": ReasonRow(
        DrainedError, "CANCELLED", False, "this worker was asked to leave, or the job is over"
    )
}

# reasons of a PushResult that are no errors: meaning and what to do
OUTCOMES = {
    "STALE": (
        "the policy found a push too old: more than --max-staleness versions, or its round was "
        "closed without it",
        "nothing, training goes on; if it is frequent, raise --max-staleness or look for why this "
        "worker is slow",
    )
}

SIGNALLED = (
    "find who sent it: of SIGKILL for want of memory `dmesg` tells; SIGSEGV, SIGBUS and SIGABRT "
    "are crashes of "
    "native code, which the log may name"
)


def explanation(word: str) -> dict[str, Any]:
    """By exit code ("12") or reason ("NO_SNAPSHOT", in any case). click.BadParameter for what is
    neither.
    """
    word = word.strip()
    if word.isdecimal():
        return _of_code(int(word))
    return _of_reason(word.upper().replace("-", "_"))


def table(document: dict[str, Any]) -> Table:
    rows = [
        (name.replace("_", " "), ", ".join(value) if isinstance(value, list) else value)
        for name, value in document.items()
        if value != []
    ]
    return Table("", (), rows)


def _of_code(code: int) -> dict[str, Any]:
    if code in EXPLANATIONS:
        meaning, remedy = EXPLANATIONS[ExitCode(code)]
    elif code - 128 in signal.valid_signals():
        meaning, remedy = f"ended by {signal_name(code - 128)} (128 + {code - 128})", SIGNALLED
    else:
        known = ", ".join(str(int(exit)) for exit in ExitCode)
        raise click.BadParameter(
            f"{code} is no exit code of these commands; they are {known}, and 128 + n for signal n"
        )
    reasons = [reason for reason, row in ERRORS.items() if row.error.exit_code == code]
    return {"exit_code": code, "meaning": meaning, "what_to_do": remedy, "reasons": reasons}


def _of_reason(reason: str) -> dict[str, Any]:
    if reason in OUTCOMES:
        meaning, remedy = OUTCOMES[reason]
        return {"reason": reason, "meaning": meaning, "what_to_do": remedy}
    if reason not in ERRORS:
        known = ", ".join([*ERRORS, *OUTCOMES])
        raise click.BadParameter(
            f"{reason} is neither an exit code nor a reason; reasons are {known}"
        )
    row = ERRORS[reason]
    code = ExitCode(row.error.exit_code)
    return {
        "reason": reason,
        "meaning": row.meaning,
        "error": f"{row.error.__name__}: {' '.join((inspect.getdoc(row.error) or '').split())}",
        "exit_code": int(code),
        "what_to_do": EXPLANATIONS[code][1],
        "may_succeed_if_repeated": row.retryable,
    }
