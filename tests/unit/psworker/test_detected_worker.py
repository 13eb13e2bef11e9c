"""What ps-worker and connect() take from the environment of an engine, and what flags decide."""

import os
from typing import Any

import pytest

import psworker
from pscommon.settings import options
from psworker import cli
from psworker.session.arguments import use_place
from tests.support.environments import SERVERS, WORKERS, config
from tests.support.events import events

WORKER = config("worker", 1, ps=SERVERS, worker=WORKERS)
FACTS = ("ps", "worker_rank", "worker_count")


@pytest.fixture(autouse=True)
def no_external_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in options.WORKER:
        for variable in option.variables:
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("PS_LOCAL", raising=False)


def taken(environ: dict[str, str], *line: str) -> tuple[Any, ...]:
    with cli.COMMAND.make_context("ps-worker", [*line, "train.py"]) as ctx:
        settings = dict(ctx.params)
    cli.complete(settings, environ)
    return tuple(settings[fact] for fact in FACTS)


def test_a_worker_takes_servers_rank_and_count() -> None:
    assert taken({"TF_CONFIG": WORKER}) == (",".join(SERVERS), 1, 2)


def test_flags_win() -> None:
    line = ("--ps", "a:1", "--worker-rank", "7")

    assert taken({"TF_CONFIG": WORKER}, *line) == ("a:1", 7, 2)
    assert taken({"TF_CONFIG": "{"}, *line, "--worker-count", "9") == ("a:1", 7, 9)


def test_what_the_environment_does_not_say_stays_open() -> None:
    assert taken({"JOB_COMPLETION_INDEX": "2"}, "--ps", "a:1") == ("a:1", 2, None)
    with pytest.raises(psworker.InvalidRequestError, match="`--ps HOST:PORT` is missing"):
        taken({"JOB_COMPLETION_INDEX": "2"})


def test_a_cluster_without_servers_is_refused() -> None:
    environ = {"TF_CONFIG": config("worker", 0, worker=WORKERS)}

    with pytest.raises(psworker.InvalidRequestError, match="needs `ps` entries"):
        taken(environ)
    assert taken(environ, "--ps", "a:1") == ("a:1", 0, 2)


def test_a_group_takes_its_rank_from_around_torchrun() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "JOB_COMPLETION_INDEX": "4"}

    assert taken(environ, "--ps", "a:1", "--group") == ("a:1", 4, None)
    assert taken(environ, "--ps", "a:1") == ("a:1", 1, 2)


def test_local_training_reads_no_environment() -> None:
    assert taken({"TF_CONFIG": "{", "PS_LOCAL": "1"}) == (None, None, None)


def test_connect_takes_servers_and_rank(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    environ = {"TF_CONFIG": WORKER}

    assert use_place(None, None, environ) == 1
    assert environ["PS_SERVERS"] == ",".join(SERVERS)
    assert use_place(None, 0, environ) == 0
    assert use_place("a:1", None, {"TF_CONFIG": WORKER}) == 1
    assert use_place("a:1", 3, {"TF_CONFIG": "{"}) == 3
    assert events(caplog).count("environment_detected") == 2


def test_connect_refuses_a_malformed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "TF_CONFIG": "{"})

    with pytest.raises(psworker.InvalidRequestError, match="TF_CONFIG is not valid"):
        psworker.connect()
