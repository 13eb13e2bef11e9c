"""What ps-server takes from the environment of an engine, and what flags decide."""

from typing import Any

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.settings import options
from pscommon.settings.command import given
from psserver import cli
from tests.support.environments import SERVERS, WORKERS, config

SERVER = config("ps", 1, ps=SERVERS, worker=WORKERS)


@pytest.fixture(autouse=True)
def no_external_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in options.SERVER:
        for variable in option.variables:
            monkeypatch.delenv(variable, raising=False)


def taken(*line: str) -> dict[str, Any]:
    """Return the settings that come from the environment, as text."""
    with cli.COMMAND.make_context("ps-server", list(line)) as ctx:
        chosen = given(ctx)
        found = cli.settings_of(cli.detected_place(chosen), chosen)
        return {key: str(value) for key, value in found.items()}


def test_a_server_takes_shard_addresses_and_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", SERVER)

    assert taken() == {
        "shard": "1/2",
        "join": SERVERS[0],
        "bind": "0.0.0.0:2222",
        "advertise": SERVERS[1],
        "min_workers": "2",
    }


@pytest.mark.parametrize("address", ["127.0.0.2:2222", "localhost:2222", "[::1]:2222"])
def test_a_server_listens_on_an_address_only(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", config("ps", 0, ps=[address]))

    found = taken()

    assert (found["bind"], "advertise" in found) == (address, False)


def test_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", SERVER)
    monkeypatch.setenv("PS_JOIN", "other:1")

    assert taken("--min-workers", "1", "--bind", "127.0.0.1:0") == {"shard": "1/2"}
    assert taken("--bind", "0.0.0.0:7")["advertise"] == SERVERS[1]
    assert "advertise" not in taken("--advertise", "mine:1")


@pytest.mark.parametrize("text", [SERVER, "{", config("worker", 0, worker=WORKERS)])
def test_a_server_with_its_shard_reads_no_environment(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", text)

    assert taken("--shard", "0/1") == {}


def test_a_server_that_is_not_listed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_ALL_SERVERS", "ps-[0-1].ps:50051")
    monkeypatch.setenv("POD_NAME", "ps-2")

    with pytest.raises(InvalidRequestError, match="'ps-2' is none of them"):
        taken()


def test_without_an_environment_nothing_is_taken() -> None:
    assert taken() == {}
