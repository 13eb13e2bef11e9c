"""`ps-ctl top` on a terminal, with a server that goes and returns."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.process_job import Servers
from tests.support.programs import programs_in
from tests.support.terminal import Terminal

LEAVE_SCREEN = "\x1b[?1049l"
"""Control sequence that gives back what the terminal showed before."""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with programs_in(tmp_path) as programs, Servers(programs, 1, "--job", "otter") as servers:
        yield servers


def test_top_shows_the_job_until_ctrl_c(servers: Servers, tmp_path: Path) -> None:
    """A lost server is said on the screen; the values return with the server."""
    with closing(Terminal(tmp_path, "ps-ctl", "--ps", servers.address, "top")) as terminal:
        terminal.wait_for("job: otter")
        servers.kill(0)
        terminal.wait_for("The server does not answer since")
        terminal.wait_for("job: otter")  # the state before
        servers.start(0)
        while "does not answer" in terminal.wait_for("job: otter"):
            pass
        terminal.press_ctrl_c()
        code = terminal.exit_code()

    assert code == 0, terminal.text
    assert "Traceback" not in terminal.text
    assert LEAVE_SCREEN in terminal.text


def test_top_without_a_server_fails_like_any_command(tmp_path: Path) -> None:
    line = ("ps-ctl", "--ps", "127.0.0.1:1", "--timeout", "1s", "top")
    with closing(Terminal(tmp_path, *line)) as terminal:
        assert terminal.exit_code() == 20, terminal.text
    assert "UNREACHABLE" in terminal.text
