"""Commands of click: help, exit codes and errors."""

from typing import Any

import click
import pytest

from pscommon.core.errors import MismatchError, TakenError
from pscommon.settings import options
from pscommon.settings.command import run_command

ALL = [(table, option) for table, members in options.TABLES.items() for option in members]


@pytest.fixture(autouse=True)
def no_external_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, option in ALL:
        for variable in option.variables:
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("PS_CONFIG", raising=False)


COMMAND = options.command("server", "ps-server", help="Some help.", epilog="Examples: one")


def test_run_command_passes_the_context_and_returns_the_code() -> None:
    assert run_command(COMMAND, lambda ctx: int(ctx.params["lease"]), ["--lease", "3"]) == 3


def test_help_has_sections_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(COMMAND, lambda _: 1, ["--help"]) == 0

    text = capsys.readouterr().out
    assert (
        text.index("Place:")
        < text.index("Job:")
        < text.index("Snapshots:")
        < text.index("General options:")
    )
    assert "Examples: one" in text


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(COMMAND, lambda _: 1, ["--version"]) == 0
    assert capsys.readouterr().out.startswith("ps-server 0.")


def test_usage_errors_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(COMMAND, lambda _: 0, ["--lease", "x"]) == 2
    assert "Error: Invalid value for '--lease'" in capsys.readouterr().err


def fail(error: BaseException) -> Any:
    def start(_: click.Context) -> int:
        raise error

    return start


def test_expected_errors_are_one_line_with_their_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(COMMAND, fail(TakenError("port 50051 is taken")), []) == 10

    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        captured.err
        == "ps-server: TAKEN: port 50051 is taken (exit code 10; ps-ctl explain TAKEN)\n"
    )


def test_debugging_shows_the_traceback_of_expected_errors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(COMMAND, fail(MismatchError("other model")), ["--log-level", "debug"]) == 11

    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("ps-server: ")


def test_ctrl_c_exits_with_130_without_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(COMMAND, fail(KeyboardInterrupt()), []) == 130
    assert capsys.readouterr().err == ""


def test_unexpected_errors_show_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(COMMAND, fail(ZeroDivisionError()), [])
