"""`ps-ctl explain` describes every exit code and every reason, and refuses others."""

import ast
import json
import re
import signal

import pytest

from pscommon.core.errors import REASONS
from pscommon.core.exit_codes import EXPLANATIONS, ExitCode
from psworker.ctl.cli import ERRORS, main
from tests.support.sources import dotted, packages

Output = pytest.CaptureFixture[str]


@pytest.mark.parametrize("code", list(ExitCode))
def test_every_exit_code_is_explained(code: ExitCode, capsys: Output) -> None:
    assert main(["explain", str(int(code)), "--output", "json"]) == 0
    document = json.loads(capsys.readouterr().out)

    assert (document["meaning"], document["what_to_do"]) == EXPLANATIONS[code]
    assert all(ERRORS[reason].error.exit_code == code for reason in document["reasons"])


@pytest.mark.parametrize("reason", list(REASONS))
def test_every_reason_is_explained(reason: str, capsys: Output) -> None:
    assert main(["--output", "json", "explain", reason.lower()]) == 0
    document = json.loads(capsys.readouterr().out)

    assert (document["reason"], document["meaning"]) == (reason, REASONS[reason].meaning)
    assert document["exit_code"] == REASONS[reason].error.exit_code
    assert document["what_to_do"]


def reasons_in_the_source() -> set[str]:
    """Return the reasons of errors and refused pushes, and those that code compares."""
    found: set[str] = set()
    for source in packages():
        for node in ast.walk(source.tree):
            parts: list[ast.expr] = []
            if isinstance(node, ast.Call):
                name = dotted(node.func).split(".")[-1] or getattr(node.func, "attr", "")
                parts += [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
                parts += (
                    node.args
                    if name.endswith("Error")
                    or name in ("__init__", "reject", "_reject", "reject_bad")
                    else []
                )
            elif isinstance(node, ast.Compare) and dotted(node.left).endswith("reason"):
                parts += node.comparators
            words = (
                word.value
                for part in parts
                for word in ast.walk(part)
                if isinstance(word, ast.Constant)
            )
            found |= {
                word
                for word in words
                if isinstance(word, str) and re.fullmatch("[A-Z]{3,}(_[A-Z]+)*", word)
            }
    return found


def test_every_reason_that_the_source_can_produce_is_explained(capsys: Output) -> None:
    found = reasons_in_the_source()

    assert found >= {"STALE", "DRAINED", "FENCED", "OUTLIER", "NOT_READY"}
    for reason in sorted(found):
        assert main(["explain", reason, "--output", "json"]) == 0, reason
        document = json.loads(capsys.readouterr().out)
        assert (document["reason"], bool(document["meaning"]), bool(document["what_to_do"])) == (
            reason,
            True,
            True,
        )


@pytest.mark.parametrize("number", sorted(signal.valid_signals()))
def test_the_exit_code_of_every_signal_is_explained(number: int, capsys: Output) -> None:
    assert main(["explain", str(128 + number), "--output", "json"]) == 0
    document = json.loads(capsys.readouterr().out)

    assert (document["exit_code"], document["reasons"]) == (128 + number, [])
    assert document["meaning"]
    assert document["what_to_do"]


def test_a_signal_is_named(capsys: Output) -> None:
    assert main(["explain", "137"]) == 0
    assert "ended by SIGKILL (128 + 9)" in capsys.readouterr().out


def test_the_default_output_is_a_table(capsys: Output) -> None:
    assert main(["explain", "non-finite"]) == 0
    text = capsys.readouterr().out

    assert "a gradient contains NaN or Inf" in text
    assert "lower the learning rate" in text


@pytest.mark.parametrize("word", ["99", "128", "193", "NO_SUCH_REASON", "", "-1", "1.5", "²"])
def test_an_unknown_code_or_reason_is_a_usage_error(word: str, capsys: Output) -> None:
    assert main(["explain", "--", word]) == 2
    assert (
        "they are 0, 1, 2, 10" in (error := capsys.readouterr().err)
        or "reasons are INTERNAL" in error
    )


def test_exit_code_21_names_every_cause_of_too_few_workers(capsys: Output) -> None:
    assert main(["explain", "21"]) == 0
    output = capsys.readouterr().out
    assert "--min-workers" in output
    assert "--on-worker-loss abort" in output
