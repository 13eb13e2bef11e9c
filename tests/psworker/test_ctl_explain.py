"""explain knows every exit code and every reason, and says so of anything else."""

import json

import pytest

from pscommon.core.errors import REASONS
from pscommon.exits import EXPLANATIONS, Exit
from psworker.ctl.cli import main

Output = pytest.CaptureFixture[str]


@pytest.mark.parametrize("code", list(Exit))
def test_every_exit_code_is_explained(code: Exit, capsys: Output) -> None:
    assert main(["explain", str(int(code)), "--output", "json"]) == 0
    document = json.loads(capsys.readouterr().out)

    assert (document["meaning"], document["what_to_do"]) == EXPLANATIONS[code]
    assert all(REASONS[reason].error.exit_code == code for reason in document["reasons"])


@pytest.mark.parametrize("reason", list(REASONS))
def test_every_reason_is_explained(reason: str, capsys: Output) -> None:
    assert main(["--output", "json", "explain", reason.lower()]) == 0
    document = json.loads(capsys.readouterr().out)

    assert (document["reason"], document["meaning"]) == (reason, REASONS[reason].meaning)
    assert document["exit_code"] == REASONS[reason].error.exit_code
    assert document["what_to_do"]


def test_people_get_a_table(capsys: Output) -> None:
    assert main(["explain", "non-finite"]) == 0
    text = capsys.readouterr().out

    assert "NaN or Inf in a gradient" in text
    assert "lower the learning rate" in text


@pytest.mark.parametrize("word", ["99", "NO_SUCH_REASON", "", "-1", "1.5", "²"])
def test_anything_else_is_bad_usage(word: str, capsys: Output) -> None:
    assert main(["explain", "--", word]) == 2
    assert "they are 0, 1, 2, 10" in (error := capsys.readouterr().err) or "reasons are INTERNAL" in error
