"""deploy/docker-compose.yml and Dockerfile match the commands that they run and each other.

test_compose_engine.py tests what needs a Docker engine.
"""

import json
import os
import re
import ssl
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
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

yaml = pytest.importorskip("yaml", reason="not installed: make setup")
COMPOSE = (DEPLOY / "docker-compose.yml").read_text()
SERVICES = yaml.safe_load(COMPOSE)["services"]
SHARDS = (0, 1)
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def variables(service: str) -> dict[str, str]:
    """Return its environment, with the defaults of the variables that it names."""
    found = SERVICES[service]["environment"]
    return {name: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", str(value)) for name, value in found.items()}


def server(service: str, monkeypatch: pytest.MonkeyPatch) -> ServerConfig:
    """Return the settings that the command of a service has in its environment."""
    for name, value in variables(service).items():
        monkeypatch.setenv(name, value)
    context = SERVER.make_context("ps-server", list(SERVICES[service]["command"]))
    return ServerConfig.from_settings(context.params)


def test_servers_and_standbys_form_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """All flags are accepted. A standby has those of its primary, and another data volume."""
    servers = [server(f"server-{shard}", monkeypatch) for shard in SHARDS]
    standbys = [server(f"standby-{shard}", monkeypatch) for shard in SHARDS]

    assert [(each.shard, each.shards) for each in servers] == [(0, 2), (1, 2)]
    assert [each.advertise for each in servers] == ["server-0:50051", "server-1:50051"]
    assert [each.join for each in servers] == [None, servers[0].advertise]
    assert all(each.exit_when_done and each.failover_lock for each in servers)
    assert servers[0].min_workers == SERVICES["worker"]["scale"] == 2
    for primary, standby, shard in zip(servers, standbys, SHARDS, strict=True):
        own = {"advertise": standby.advertise, "standby_of": primary.advertise}
        assert replace(primary, **own) == standby
        assert standby.advertise == f"standby-{shard}:50051"
        shared = {*SERVICES[f"server-{shard}"]["volumes"]} & {
            *SERVICES[f"standby-{shard}"]["volumes"]
        }
        assert {volume.partition(":")[0] for volume in shared} == {"primaries", "credentials"}


def test_profiles_start_what_is_not_needed() -> None:
    profiles = {name: each["profiles"] for name, each in SERVICES.items() if "profiles" in each}

    assert profiles == {
        "standby-0": ["standby"],
        "standby-1": ["standby"],
        "prometheus": ["obs"],
        "grafana": ["obs"],
    }


def test_the_image_names_both_ports_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of --bind, and the stream port."""
    bind = server("server-0", monkeypatch).bind
    ports = re.search(r"^FROM runtime AS server\n(?:#.*\n)?EXPOSE (.*)$", DOCKERFILE, re.M)

    assert ports
    assert ports[1].split() == [each.rpartition(":")[2] for each in (bind, default_bind(bind))]


def test_workers_run_an_existing_example_against_both_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They have no fixed rank, so their number can change."""
    for name, value in variables("worker").items():
        monkeypatch.setenv(name, value)
    settings = WORKER.make_context("ps-worker", list(SERVICES["worker"]["command"])).params

    assert settings["ps"] == "server-0:50051,server-1:50051"
    assert settings["worker_rank"] is None
    assert settings["module"]
    assert find_spec(settings["script"])


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\bPS_\w+(?=[:=])", COMPOSE + DOCKERFILE))))
def test_each_environment_variable_belongs_to_a_command(name: str) -> None:
    """A misspelt variable would have no effect."""
    options = [each for each in (*SERVER.params, *WORKER.params) if isinstance(each, click.Option)]

    assert name in {variable for option in options for variable in (option.envvar or ())}


def test_prometheus_scrapes_every_container() -> None:
    """It names servers and workers, and the port that the image serves and probes."""
    bind = re.search(r"PS_METRICS_BIND=[\d.]+:(\d+)", DOCKERFILE)
    assert bind
    config = (DEPLOY / "prometheus.yml").read_text()
    servers, workers = config.split("job_name: workers")

    assert re.findall(r'"([\w-]+):(\d+)"', servers) == [
        (name, bind[1]) for name in ("server-0", "server-1")
    ]
    # one name has the addresses of all workers
    assert f"{{names: [worker], type: A, port: {bind[1]}, " in workers
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
    ended = {"condition": "service_completed_successfully"}
    for name in SERVICES.keys() - {"credentials", "grafana"}:
        assert SERVICES[name]["depends_on"]["credentials"] == ended
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
    assert SERVICES["prometheus"]["user"] == "10001:10001"


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


def test_the_shm_overlay_covers_all_servers_and_workers() -> None:
    """All have the servers' Unix sockets, and no namespace of another container.

    Without nocopy the folder gets the mode of the image's when the next container is made.
    """
    overlay = (DEPLOY / "docker-compose.shm.yml").read_text()
    found = dict(re.findall(r"^  ([\w-]+):\n    volumes: \[\"sockets:(\S+)\"\]$", overlay, re.M))

    names = {
        name for name, each in SERVICES.items() if "PS_TLS_CERT" in each.get("environment", ())
    }
    assert found == dict.fromkeys(names, f"{socket_port.FOLDER}:nocopy")
    assert "\n  sockets:\n    driver_opts: {type: tmpfs, device: tmpfs," in overlay
    assert not re.search("ipc|shm_size|network", overlay)


def test_processes_in_the_image_do_not_run_as_root() -> None:
    """Signals reach the command itself."""
    runtime = DOCKERFILE.partition(" AS runtime")[2]

    assert re.findall(r"^USER (.*)$", runtime, re.M) == ["10001:10001"]
    assert re.findall(r"^ENTRYPOINT (.*)$", runtime, re.M) == ['["ps-worker"]', '["ps-server"]']
