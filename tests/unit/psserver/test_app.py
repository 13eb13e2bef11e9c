"""Signals to a server process."""

import signal
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from psserver import app


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
