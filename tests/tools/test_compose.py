"""deploy/docker-compose.yml and Dockerfile match the commands that they run and each other.

deploy/test-compose tests what needs a Docker engine.
"""

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec

import click
import pytest

from pscommon.telemetry.http import MetricsServer, new_registry
from pscommon.wire.endpoint import Endpoint, listen_http
from psserver.cli import COMMAND as SERVER
from psserver.process.config import ServerConfig
from psserver.sockets.socket_port import default_bind
from psworker.cli import COMMAND as WORKER
from tests.support.prometheus_queries import DEPLOY

COMPOSE = (DEPLOY / "docker-compose.yml").read_text()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def service(name: str) -> str:
    """Return the text of one service; no YAML parser is installed."""
    found = re.search(rf"^  {name}:\n((?:(?: {{4}}.*)?\n)+)", COMPOSE, re.M)
    assert found, name
    return found[1]


def server(shard: int) -> ServerConfig:
    flags = re.findall(r"^ +- (--\S+)$", service(f"server-{shard}"), re.M)
    return ServerConfig.from_settings(SERVER.make_context("ps-server", flags).params)


def test_both_servers_form_one_job() -> None:
    """All flags are accepted. Both servers share the data directory and exit with the job."""
    servers = [server(0), server(1)]

    assert [(each.shard, each.shards) for each in servers] == [(0, 2), (1, 2)]
    assert [each.advertise for each in servers] == ["server-0:50051", "server-1:50051"]
    assert servers[1].join == servers[0].advertise
    assert servers[0].data_dir == servers[1].data_dir
    assert all(each.exit_when_done for each in servers)
    assert servers[0].min_workers == 2


def test_the_image_names_both_ports_of_a_server() -> None:
    """The one of --bind, and the stream port."""
    bind = server(0).bind
    ports = re.search(r"^FROM runtime AS server\n(?:#.*\n)?EXPOSE (.*)$", DOCKERFILE, re.M)

    assert ports
    assert ports[1].split() == [each.rpartition(":")[2] for each in (bind, default_bind(bind))]


def test_workers_run_an_existing_example_against_both_servers() -> None:
    command = re.search(r"command: &train \[(.*)\]", service("worker-0"))
    assert command
    args = [arg.strip('"') for arg in re.findall(r'"[^"]*"|[^\s,"]+', command[1])]
    settings = WORKER.make_context("ps-worker", args).params

    assert re.search("command: [*]train", service("worker-1"))
    assert settings["ps"] == ",".join(str(server(shard).advertise) for shard in (0, 1))
    assert settings["module"]
    assert find_spec(settings["script"])


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\bPS_\w+(?=[:=])", COMPOSE + DOCKERFILE))))
def test_each_environment_variable_belongs_to_a_command(name: str) -> None:
    """A misspelt variable would have no effect."""
    options = [each for each in (*SERVER.params, *WORKER.params) if isinstance(each, click.Option)]

    assert name in {variable for option in options for variable in (option.envvar or ())}


def test_prometheus_scrapes_every_container() -> None:
    """It names all four containers and the port that the image serves and probes."""
    bind = re.search(r"PS_METRICS_BIND=[\d.]+:(\d+)", DOCKERFILE)
    assert bind
    config = (DEPLOY / "prometheus.yml").read_text()
    servers, workers = config.split("job_name: workers")

    assert re.findall(r'"([\w-]+):(\d+)"', servers) == [
        (name, bind[1]) for name in ("server-0", "server-1")
    ]
    # with --scale a name has several addresses
    assert f"{{names: [worker-0, worker-1], type: A, port: {bind[1]}, " in workers
    assert f"http://127.0.0.1:{bind[1]}/readyz" in DOCKERFILE


@pytest.mark.parametrize(("ready", "code"), [(True, 0), (False, 1)])
def test_health_check_ignores_the_configured_proxy(ready: bool, code: int) -> None:
    """Docker sets proxy variables in containers."""
    command = re.search(r"HEALTHCHECK .* CMD (\[.*?\])$", DOCKERFILE.replace("\\\n", ""), re.M)
    assert command
    name, *arguments = json.loads(command[1])
    assert name == "python"
    away = {"http_proxy": "http://127.0.0.1:9"}
    with closing(
        MetricsServer(listen_http(Endpoint("127.0.0.1:0")), new_registry(), lambda: (ready, ""))
    ) as monitor:
        here = [text.replace("127.0.0.1:9464", monitor.address) for text in arguments]
        done = subprocess.run(
            [sys.executable, *here], env=os.environ | away, stderr=subprocess.DEVNULL, timeout=60
        )

    assert done.returncode == code


def test_the_shm_overlay_covers_all_four_services() -> None:
    """server-0 owns the memory, the others depend on it; its size is configurable."""
    overlay = (DEPLOY / "docker-compose.shm.yml").read_text()
    found = dict(re.findall(r"^  ([\w-]+):\n    ipc: (\S+)$", overlay, re.M))
    joined = ("server-1", "worker-0", "worker-1")

    assert found == {"server-0": "shareable", **dict.fromkeys(joined, "service:server-0")}
    assert re.search(r"^  server-0:\n    ipc: .*\n    shm_size: \${SHM_SIZE:-\w+}$", overlay, re.M)
    assert all("depends_on: [server-0" in text for text in (overlay, COMPOSE))


def test_processes_in_the_image_do_not_run_as_root() -> None:
    """Signals reach the command itself."""
    runtime = DOCKERFILE.partition(" AS runtime")[2]

    assert re.findall(r"^USER (.*)$", runtime, re.M) == ["10001:10001"]
    assert re.findall(r"^ENTRYPOINT (.*)$", runtime, re.M) == ['["ps-worker"]', '["ps-server"]']
