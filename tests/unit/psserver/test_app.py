"""A server process: its signals, and a warning about its address."""

import signal
import socket
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from psserver import app
from tests.support.events import events


def test_a_signal_during_the_takeover_of_a_standby_stops_the_new_primary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The signal arrives before there is a server object to stop."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    ended, reasons = threading.Event(), list[str]()

    def stop(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    signals = app._StopSignals(lambda reason: None)
    signals._first(signal.SIGTERM, None)
    server = SimpleNamespace(start=lambda: None, close=lambda: None, stop=stop, ended=ended)
    server.failure, server.job_is_over, server.not_saved = None, False, ""

    assert app.serve(cast(Any, server), signals) == 128 + signal.SIGTERM
    assert reasons == ["SIGTERM"]


# Debian's /etc/hosts has the name of the host with 127.0.1.1
HOSTS = {"host0": "127.0.1.1", "host1": "10.0.0.1", "localhost": "127.0.0.1", "127.0.0.1": ""}


@pytest.mark.parametrize("host", [*HOSTS, "unknown", "[::1]", "0.0.0.0"])
def test_a_host_name_that_is_the_loopback_address_warns(
    host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def resolve(name: str, port: None) -> list[tuple[Any, ...]]:
        if name == "unknown":
            raise socket.gaierror
        return [(socket.AF_INET, None, 6, "", (HOSTS.get(name) or name, 0))]

    monkeypatch.setattr("socket.getaddrinfo", resolve)

    app.warn_of_loopback(f"{host}:50051")

    assert events(caplog) == (["bind_on_loopback"] if host == "host0" else [])
    if host == "host0":
        assert "--bind 0.0.0.0:50051 --advertise" in caplog.text
