"""What a server says at its start about ports that other machines reach."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pscommon.security.certificates import init_tls
from pscommon.security.tokens import init_tokens
from tests.support.programs import Program, Programs, programs_in

OPEN = ("--bind", "0.0.0.0:0", "--advertise", "localhost:1", "--stream-bind", "0.0.0.0:0")
METRICS = ("--metrics-bind", "0.0.0.0:0")


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    init_tls(tmp_path)
    init_tokens(tmp_path)
    with programs_in(tmp_path) as programs:
        yield programs


def ended(server: Program) -> Program:
    """Wait until the server listens, and stop it."""
    server.wait_for("listening")
    server.send(signal.SIGTERM)
    server.wait()
    return server


def tls() -> tuple[str, ...]:
    return ("--tls-ca", "ca.pem", "--tls-cert", "cert.pem", "--tls-key", "key.pem")


def test_plain_text_needs_permission_and_gives_one_warning(programs: Programs) -> None:
    refused = programs.run("ps-server", *OPEN, *METRICS)
    server = ended(programs.start("ps-server", *OPEN, *METRICS, "--insecure"))

    assert refused.wait() == 2
    assert "--tls-ca" in refused.err
    assert "`--insecure`" in refused.err
    assert server.err.count("plain_text_permitted") == 1
    assert "bind_on_loopback" not in server.err


def test_with_tls_and_tokens_there_is_nothing_to_warn_of(programs: Programs) -> None:
    server = ended(programs.start("ps-server", *OPEN, *METRICS, *tls(), "--token-file", "tokens"))

    assert "warning" not in server.err


def test_with_tls_alone_each_certificate_has_all_roles(programs: Programs) -> None:
    server = ended(programs.start("ps-server", *OPEN, *tls()))

    assert server.err.count("roles_not_checked") == 1
    assert "plain_text_permitted" not in server.err


def test_on_loopback_insecure_changes_nothing(programs: Programs) -> None:
    server = ended(programs.start("ps-server", "--bind", "127.0.0.1:0", "--insecure"))

    assert "warning" not in server.err
