"""deploy/docker-compose.yml and Dockerfile match the commands that they run and each other.

deploy/test-compose tests what needs a Docker engine.
"""

import json
import os
import re
import ssl
import subprocess
import sys
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from pscommon.security.certificates import init_tls
from pscommon.security.tls_files import CLIENT_NAME, SERVER_NAME
from pscommon.security.tokens import init_tokens
from pscommon.telemetry.http import MetricsServer, new_registry
from pscommon.wire.endpoint import Endpoint, listen_http
from psserver.cli import COMMAND as SERVER
from psserver.process.config import ServerConfig
from psserver.sockets import socket_port
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
    flags += protection("x-server: &server")
    return ServerConfig.from_settings(SERVER.make_context("ps-server", flags).params)


def protection(heading: str) -> list[str]:
    """Return the flags of the PS_TLS_ and PS_TOKEN_FILE variables below a heading."""
    text = COMPOSE.partition(heading)[2].partition("\n\n")[0]
    found = re.findall(r"PS_(TLS_\w+|TOKEN_FILE): (\S+)$", text, re.M)
    flags = [(f"--{name.lower().replace('_', '-')}", path) for name, path in found]
    return [each for flag in flags for each in flag]


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
    args = [*protection("x-worker-environment"), *args]
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
    assert f"://127.0.0.1:{bind[1]}/readyz" in DOCKERFILE


def test_all_services_use_the_files_that_one_makes_first(tmp_path: Path) -> None:
    """Each name of a file below /credentials is one that the service `credentials` writes."""
    made = {path.name for path in (*init_tls(tmp_path), *init_tokens(tmp_path))}
    config = (DEPLOY / "prometheus.yml").read_text()
    used = re.findall(r"/credentials/([\w.-]+)", COMPOSE + config)

    assert re.search("ps-ctl tls init /credentials\n +ps-ctl token init /credentials\n", COMPOSE)
    assert made | {"worker-tokens"} >= set(used) >= {"cert.pem", "client-cert.pem", "read.token"}
    # all lines of a worker's file are roles that it needs: its own, and that of Prometheus
    assert "grep -E '^(worker|read) ' /credentials/tokens > /credentials/worker-tokens" in COMPOSE
    # YAML merges the variables of a service only if it names them
    assert all("<<: *worker-environment" in service(f"worker-{n}") for n in (0, 1))
    waiting = "credentials: {condition: service_completed_successfully}"
    assert COMPOSE.count(waiting) == 1
    assert COMPOSE.count("depends_on: *credentials") == 2
    assert "depends_on:\n    <<: *credentials\n" in COMPOSE
    assert "install -d -o 10001 -g 10001 -m 0700 /credentials" in DOCKERFILE


def test_prometheus_reads_over_https_with_the_read_token() -> None:
    """It runs as the user of the files. Servers and workers have different certificates."""
    for name, owner in (("servers", SERVER_NAME), ("workers", CLIENT_NAME)):
        job = (DEPLOY / "prometheus.yml").read_text().partition(f"job_name: {name}\n")[2]
        assert job.startswith(
            "    scheme: https\n"
            f"    tls_config: {{ca_file: /credentials/ca.pem, server_name: {owner}}}\n"
            "    authorization: {credentials_file: /credentials/read.token}\n"
        )
    assert re.search('user: "10001:10001"', service("prometheus"))


@pytest.mark.parametrize(("ready", "code"), [(True, 0), (False, 1)])
def test_health_check_ignores_the_configured_proxy(ready: bool, code: int) -> None:
    """Docker sets proxy variables in containers."""
    with closing(
        MetricsServer(listen_http(Endpoint("127.0.0.1:0")), new_registry(), lambda: (ready, ""))
    ) as monitor:
        assert health_check(monitor.address, PS_TLS_CERT="") == code


class ReadyPage(BaseHTTPRequestHandler):
    """Answers /readyz."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 404)
        self.end_headers()


def test_health_check_does_not_verify_the_certificate(tmp_path: Path) -> None:
    """It asks the port by address, and the CA is not that of the system."""
    init_tls(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with HTTPServer(("127.0.0.1", 0), ReadyPage) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        address = f"127.0.0.1:{server.server_port}"
        try:
            assert health_check(address, PS_TLS_CERT=str(tmp_path / "cert.pem")) == 0
            assert health_check(address, PS_TLS_CERT="") == 1
        finally:
            server.shutdown()
            serving.join()


def health_check(address: str, **environment: str) -> int:
    """Run the image's health check against an address; return its exit code."""
    command = re.search(r"HEALTHCHECK .* CMD (\[.*?\])$", DOCKERFILE.replace("\\\n", ""), re.M)
    assert command
    name, *arguments = json.loads(command[1])
    assert name == "python"
    here = [text.replace("127.0.0.1:9464", address) for text in arguments]
    away = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, *here],
        env=os.environ | away | environment,
        stderr=subprocess.DEVNULL,
        timeout=60,
    )
    return done.returncode


def test_the_shm_overlay_covers_all_four_services() -> None:
    """All have the servers' Unix sockets, and no namespace of another container.

    Without nocopy the folder gets the mode of the image's when the next container is made.
    """
    overlay = (DEPLOY / "docker-compose.shm.yml").read_text()
    found = dict(re.findall(r"^  ([\w-]+):\n    volumes: \[\"sockets:(\S+)\"\]$", overlay, re.M))

    names = ("server-0", "server-1", "worker-0", "worker-1")
    assert found == dict.fromkeys(names, f"{socket_port.FOLDER}:nocopy")
    assert "\n  sockets:\n    driver_opts: {type: tmpfs, device: tmpfs," in overlay
    assert not re.search("ipc|shm_size|network", overlay)


def test_processes_in_the_image_do_not_run_as_root() -> None:
    """Signals reach the command itself."""
    runtime = DOCKERFILE.partition(" AS runtime")[2]

    assert re.findall(r"^USER (.*)$", runtime, re.M) == ["10001:10001"]
    assert re.findall(r"^ENTRYPOINT (.*)$", runtime, re.M) == ['["ps-worker"]', '["ps-server"]']
