"""`ps-ctl explain`: meaning and remedy of an exit code or an error reason."""

import inspect
import signal
from typing import Any

import click

from pscommon.core.errors import REASONS, ReasonRow
from pscommon.core.exit_codes import EXPLANATIONS, ExitCode
from psworker.ctl.output import Table
from psworker.launch.decisions import signal_name
from psworker.session.drain import DrainedError

# REASONS plus the one reason that is never transmitted
ERRORS = REASONS | {
    "DRAINED": ReasonRow(
        DrainedError, "the worker was asked to leave, or the job has ended", "CANCELLED"
    )
}

# reasons of a PushResult that are not errors: meaning and remedy
OUTCOMES = {
    "STALE": (
        "a push was too old: older than --max-staleness versions, or its round was closed",
        "nothing, training continues; if frequent, raise --max-staleness or find out why this "
        "worker is slow",
    )
}

SIGNAL_REMEDY = (
    "find the sender of the signal: `dmesg` reports SIGKILL after memory exhaustion; "
    "SIGSEGV, SIGBUS and SIGABRT are crashes of native code, see the log"
)


def explanation(word: str) -> dict[str, Any]:
    """Explain an exit code ("12") or a reason ("NO_SNAPSHOT", in any case).

    Raises:
        click.BadParameter: the word is neither.
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
        meaning, remedy = f"ended by {signal_name(code - 128)} (128 + {code - 128})", SIGNAL_REMEDY
    else:
        known = ", ".join(str(int(exit)) for exit in ExitCode)
        raise click.BadParameter(
            f"unknown exit code {code}: they are {known}, and 128 + n for signal n"
        )
    reasons = [reason for reason, row in ERRORS.items() if row.error.exit_code == code]
    return {"exit_code": code, "meaning": meaning, "what_to_do": remedy, "reasons": reasons}


def _of_reason(reason: str) -> dict[str, Any]:
    if reason in OUTCOMES:
        meaning, remedy = OUTCOMES[reason]
        return {"reason": reason, "meaning": meaning, "what_to_do": remedy}
    if reason not in ERRORS:
        known = ", ".join([*ERRORS, *OUTCOMES])
        raise click.BadParameter(f"unknown exit code or reason {reason}: reasons are {known}")
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
