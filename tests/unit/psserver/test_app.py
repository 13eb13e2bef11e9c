"""A server process and the signals that it gets."""

import signal
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from psserver import app


def test_a_signal_to_a_standby_that_takes_over_just_then_ends_the_primary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It came before there was any server to tell; another one would end the process at once,
    with all that it has.
    """
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    ended, told = threading.Event(), list[str]()

    def stop(reason: str) -> None:
        told.append(reason)
        ended.set()

    signals = app._StopSignals(lambda reason: None)
    signals._first(signal.SIGTERM, None)
    server = SimpleNamespace(start=lambda: None, close=lambda: None, stop=stop, ended=ended)
    server.failure, server.job_is_over, server.not_saved = None, False, ""

    assert app.serve(cast(Any, server), signals) == 128 + signal.SIGTERM
    assert told == ["SIGTERM"]
