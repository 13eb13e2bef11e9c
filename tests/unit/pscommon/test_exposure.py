"""Which addresses a process may listen on without TLS, and the warning where it is permitted."""

import ipaddress
import socket
from pathlib import Path
from typing import Any

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.security.settings import (
    SecuritySettings,
    check_exposure,
    is_loopback,
    warn_of_plain_text,
)
from pscommon.security.tls_files import TlsFiles
from tests.support.events import events

TLS = SecuritySettings(tls=TlsFiles(Path("ca.pem"), Path("cert.pem"), Path("key.pem")))
INSECURE = SecuritySettings(insecure=True)
TOKENS = SecuritySettings(token_file=Path("tokens"))
NOTHING = SecuritySettings()

NAMES = {
    "localhost": ["127.0.0.1", "::1"],
    "debian": ["127.0.1.1"],  # the name of the host in Debian's /etc/hosts
    "host1": ["10.0.0.1"],
    "both": ["127.0.0.1", "10.0.0.1"],
    "linklocal": ["fe80::1%eth0"],
}
CLOSED = ["127.0.0.1:1", "127.8.9.10:1", "[::1]:1", "::1:1", "localhost:0", "debian:1"]
OPEN = [
    "0.0.0.0:1",
    "[::]:1",
    ":1",
    "10.0.0.1:1",
    "[2001:db8::1]:1",
    "host1:1",
    "both:1",
    "linklocal:1",
    "unknown:1",
]


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: object, *_: object, **__: object) -> list[tuple[Any, ...]]:
        found = NAMES.get(host) or [host or "0.0.0.0"]
        try:
            [ipaddress.ip_address(each.partition("%")[0]) for each in found]
        except ValueError:
            raise socket.gaierror(host) from None
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in found]

    monkeypatch.setattr("socket.getaddrinfo", resolve)


@pytest.mark.parametrize("address", CLOSED)
@pytest.mark.parametrize("settings", [NOTHING, TOKENS, TLS, INSECURE])
def test_loopback_needs_nothing(address: str, settings: SecuritySettings) -> None:
    check_exposure("--bind", address, settings)

    assert is_loopback(address)


@pytest.mark.parametrize("address", OPEN)
@pytest.mark.parametrize("settings", [TLS, INSECURE])
def test_other_addresses_are_served_with_tls_or_insecure(
    address: str, settings: SecuritySettings
) -> None:
    check_exposure("--bind", address, settings)


@pytest.mark.parametrize("flag", ["--bind", "--stream-bind", "--metrics-bind"])
@pytest.mark.parametrize("address", OPEN)
@pytest.mark.parametrize("settings", [NOTHING, TOKENS])
def test_other_addresses_are_refused_with_both_remedies(
    flag: str, address: str, settings: SecuritySettings
) -> None:
    """Tokens alone are no protection: they would be sent in plain text."""
    with pytest.raises(InvalidRequestError) as caught:
        check_exposure(flag, address, settings)

    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert message.startswith(f"{flag} {address} ")
    assert all(
        part in message for part in ("--tls-ca", "--tls-cert", "--tls-key", "ps-ctl tls init")
    )
    assert "`--insecure`" in message


def test_a_start_with_plain_text_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """The warning lists each address that others reach."""
    warn_of_plain_text(["10.0.0.1:1", "10.0.0.1:1", "127.0.0.1:1", "[::]:2", None], INSECURE)

    assert events(caplog) == ["plain_text_permitted"]
    assert "10.0.0.1:1" in caplog.text
    assert "[::]:2" in caplog.text
    assert "127.0.0.1" not in caplog.text


@pytest.mark.parametrize("addresses", [CLOSED, [None], []])
def test_loopback_does_not_warn(
    addresses: list[str | None], caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_plain_text(addresses, INSECURE)

    assert not events(caplog)


def test_tls_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_plain_text(OPEN, TLS)

    assert not events(caplog)
