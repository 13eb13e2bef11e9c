"""What an exit code or the reason of an error means, and what to do."""

import inspect
from typing import Any

import click

from pscommon.core.errors import REASONS
from pscommon.exits import EXPLANATIONS, Exit
from psworker.ctl.output import Table


def explanation(word: str) -> dict[str, Any]:
    """By exit code ("12") or reason ("NO_SNAPSHOT", in any case). click.BadParameter for what is neither."""
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
    if code not in EXPLANATIONS:
        known = ", ".join(str(int(exit)) for exit in Exit)
        raise click.BadParameter(f"{code} is no exit code of these commands; they are {known}")
    meaning, remedy = EXPLANATIONS[Exit(code)]
    reasons = [reason for reason, row in REASONS.items() if row.error.exit_code == code]
    return {"exit_code": code, "meaning": meaning, "what_to_do": remedy, "reasons": reasons}


def _of_reason(reason: str) -> dict[str, Any]:
    if reason not in REASONS:
        raise click.BadParameter(f"{reason} is neither an exit code nor a reason; reasons are {', '.join(REASONS)}")
    row = REASONS[reason]
    code = Exit(row.error.exit_code)
    return {
        "reason": reason,
        "meaning": row.meaning,
        "error": f"{row.error.__name__}: {' '.join((inspect.getdoc(row.error) or '').split())}",
        "exit_code": int(code),
        "what_to_do": EXPLANATIONS[code][1],
        "may_succeed_if_repeated": row.retryable,
    }
