"""deploy/ in a real Docker engine: the job trains, and survives what happens to containers.

`make test-compose` runs it. Of Prometheus and Grafana only their containers' settings are tested:
no image is pulled.
"""

import json
import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pscommon.core.exit_codes import ExitCode
from tests.support.prometheus_queries import DEPLOY
from tests.support.workers import until

PREFIX = "paramserver-test"
TARGETS = ("server", "worker")
SERVERS = ("server-0", "server-1")
FILES = tuple(
    f"--tls-{name}=/credentials/{file}"
    for name, file in (("ca", "ca.pem"), ("cert", "cert.pem"), ("key", "key.pem"))
)
MAX_IMAGE_MB = 900
MAX_RECOVERY_SECONDS = 15
BASE = "python:3.11-slim-bookworm"
BASE_MB = 130  # of the official base image; a stand-in for it may be larger
ENDLESS = "100000"
SECONDS = 240
"""A build may run beside the job."""


def answers(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    except FileNotFoundError:
        return False


COMPOSE = ("docker", "compose") if answers("docker", "compose", "version") else ("docker-compose",)
HAS_ENGINE = answers("docker", "info") and bool(shutil.which(COMPOSE[0]))
pytestmark = [
    pytest.mark.skipif(not HAS_ENGINE, reason="no Docker engine with Compose answers"),
    pytest.mark.timeout(1500),
]


def docker(*arguments: str, check: bool = True) -> str:
    """Return the output of a docker command, without the last line feed."""
    done = subprocess.run(("docker", *arguments), capture_output=True, text=True)
    assert not check or done.returncode == 0, f"docker {arguments}: {done.stderr}"
    return done.stdout.removesuffix("\n")


class Project:
    """One compose project.

    files: Paths of its compose files.
    """

    def __init__(self, *files: Path, **environment: str) -> None:
        self.name = f"paramserver-test-{uuid.uuid4().hex[:8]}"
        named = [word for file in files for word in ("--file", str(file))]
        self._command = [*COMPOSE, "--project-name", self.name, *named]
        self._environment = os.environ | {"IMAGE_PREFIX": PREFIX} | environment

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*self._command, *arguments], env=self._environment, capture_output=True, text=True
        )
        assert not check or done.returncode == 0, f"{arguments}: {done.stderr}"
        return done

    def up(self, *arguments: str) -> None:
        self.run("up", "--detach", "--no-build", *arguments)

    def containers(self, service: str = "") -> list[str]:
        """Return the IDs of the containers, running or not, of a service or of all."""
        labels = [f"label=com.docker.compose.project={self.name}"]
        labels += [f"label=com.docker.compose.service={service}"] if service else []
        filters = [word for label in labels for word in ("--filter", label)]
        return docker("ps", "--all", "--quiet", *filters).split()

    def container(self, service: str) -> str:
        (found,) = self.containers(service)
        return found

    def status(self, server: str = "server-0") -> dict[str, Any]:
        """Return what `ps-ctl status` tells in a container; empty while no server answers."""
        command = ("ps-ctl", "--ps", f"{server}:50051", "status", "--output", "json")
        text = docker("exec", self.container(server), *command, check=False)
        return json.loads(text) if text else {}  # type: ignore[no-any-return]

    def version(self, server: str = "server-0") -> int:
        return int(self.status(server).get("version") or 0)

    def codes(self, *services: str) -> dict[str, int]:
        """Wait until the containers of these services have ended for good; return exit codes."""
        names = {each: service for service in services for each in self.containers(service)}

        def state(each: str) -> tuple[str, int]:
            status, code = docker(
                "inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", each
            ).split()
            return status, int(code)

        until(lambda: all(state(each)[0] == "exited" for each in names), f"{services} end", SECONDS)
        return {f"{service} {each[:4]}": state(each)[1] for each, service in names.items()}

    def assert_done(self, *services: str) -> None:
        assert set(self.codes(*services).values()) == {int(ExitCode.DONE)}, self.logs()

    def stop(self) -> None:
        """End the job as an operator does."""
        command = ("ps-ctl", "--ps", "server-0:50051", "stop", "--yes")
        docker("exec", self.container("server-0"), *command)

    def logs(self, *services: str) -> str:
        return self.run("logs", "--no-color", *services).stdout


@contextmanager
def started(*files: Path, **environment: str) -> Iterator[Project]:
    """Yield a project without containers; remove all that it has made at the end."""
    project = Project(DEPLOY / "docker-compose.yml", *files, **environment)
    profiles = ("--profile", "standby", "--profile", "obs")
    try:
        yield project
    finally:
        project.run(*profiles, "down", "--volumes", "--timeout", "5")


@pytest.fixture(scope="module", autouse=True)
def images() -> Iterator[None]:
    """Build the images; KEEP_IMAGES=1 keeps them for the next run."""
    Project(DEPLOY / "docker-compose.yml").run("build")
    yield
    if not os.environ.get("KEEP_IMAGES"):
        docker("image", "rm", "--force", *(f"{PREFIX}-{target}" for target in TARGETS))
        for stage in ("wheel", "torch"):
            docker("image", "prune", "--force", "--filter", f"label=paramserver.stage={stage}")


def first_step(project: Project) -> float:
    """Return the seconds until the first update."""
    began = time.monotonic()
    until(lambda: project.version() > 0, "the first update", SECONDS)
    return time.monotonic() - began


def kill_processes(container: str) -> None:
    """Kill all processes in a container, so that it ends as after a crash.

    Docker restarts no container that `docker kill` has ended.
    """
    docker("exec", container, "sh", "-c", "kill -KILL -1", check=False)


def goes_on(project: Project, event: Callable[[], object]) -> float:
    """Return the seconds from the end of an event until there is a newer version."""
    before = project.version()
    event()
    began = time.monotonic()
    until(lambda: project.version() > before, f"a newer version than {before}", SECONDS)
    return time.monotonic() - began


def test_images_are_small_and_do_not_run_as_root() -> None:
    """The sizes are uncompressed, with the official base image."""
    size = {
        name: int(docker("image", "inspect", "--format", "{{.Size}}", name)) / 1e6
        for name in (BASE, *(f"{PREFIX}-{target}" for target in TARGETS))
    }
    for target in TARGETS:
        own = size[f"{PREFIX}-{target}"] - size[BASE]
        print(f"image of the {target}: {own:.0f} MB without its base of {size[BASE]:.0f} MB")
        assert own + BASE_MB < MAX_IMAGE_MB
    shell = ("run", "--rm", "--read-only", "--entrypoint", "sh", f"{PREFIX}-server", "-c")

    assert docker(*shell, "id -u; touch /usr/x /opt/paramserver/x 2>&1 | grep -c Read-only") == (
        "10001\n2"
    )


def test_trains_digits() -> None:
    """The job ends by itself. The root of each container is read-only."""
    with started() as project:
        began = time.monotonic()
        project.up()
        took = time.monotonic() - began
        took += first_step(project)
        print(f"from `up` to the first step: {took:.1f} s")
        assert len(project.containers()) == 5  # without the profiles no standbys and no Prometheus
        for container in project.containers():
            assert docker("inspect", "--format", "{{.HostConfig.ReadonlyRootfs}}", container) == (
                "true"
            )

        project.assert_done("worker", *SERVERS)
        assert "test accuracy 0.9" in project.logs("worker")
        run = ("run", "--rm", "--volumes-from", project.container("server-0"))
        verify = ("--entrypoint", "ps-ctl", f"{PREFIX}-server", "snapshot", "verify", "/data")
        assert "sound" in docker(*run, *verify)


def test_workers_join_and_leave() -> None:
    """2 workers become 4 and 2 again."""
    with started(EPOCHS=ENDLESS) as project:
        project.up()
        first_step(project)
        if shutil.which("promtool"):
            assert_valid(metrics_of(project, "server-0"))
        project.up("--scale", "worker=4")
        until(lambda: len(active(project)) == 4, "four workers", SECONDS)
        project.up("--scale", "worker=2")
        until(lambda: len(active(project)) == 2, "two workers", SECONDS)
        goes_on(project, lambda: None)

        project.stop()
        project.assert_done("worker", *SERVERS)


def active(project: Project) -> list[dict[str, Any]]:
    return [each for each in project.status().get("workers", ()) if each["state"] == "active"]


def metrics_of(project: Project, service: str) -> str:
    """Return the page, fetched with the read token inside the container."""
    program = """
import ssl, urllib.request as web
https = web.HTTPSHandler(context=ssl._create_unverified_context())
token = open("/credentials/read.token").read().strip()
page = web.Request(
    "https://127.0.0.1:9464/metrics", headers={"Authorization": f"Bearer {token}"}
)
print(web.build_opener(web.ProxyHandler({}), https).open(page, timeout=5).read().decode())
"""
    return docker("exec", project.container(service), "python", "-c", program)


def assert_valid(metrics: str) -> None:
    ours = "".join(f"{line}\n" for line in metrics.splitlines() if re.search(r"(^| )ps_", line))
    done = subprocess.run(
        ("promtool", "check", "metrics"), input=ours, text=True, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def is_back(project: Project, killed: str) -> bool:
    """Return whether two workers train; a killed one has joined again with another number."""
    numbers = [each["worker"] for each in active(project)]
    return len(numbers) == 2 and (killed in SERVERS or max(numbers) > 2)


@pytest.mark.parametrize("killed", ["server-0", "server-1", "worker"])
def test_a_crashed_container_is_restarted(killed: str) -> None:
    with started(EPOCHS=ENDLESS) as project:
        project.up()
        first_step(project)
        container = project.containers(killed)[0]

        took = goes_on(project, lambda: kill_processes(container))

        print(f"{killed} crashed: next update after {took:.1f} s")
        # a worker that finds no servers at its start would end with another code
        until(lambda: is_back(project, killed), "two workers", SECONDS)
        project.stop()
        project.assert_done("worker", *SERVERS)
        restarts = {
            each: docker("inspect", "--format", "{{.RestartCount}}", each)
            for each in project.containers()
        }
        assert restarts.pop(container) == "1"
        assert set(restarts.values()) == {"0"}


def test_a_killed_server_goes_on_when_it_is_started_again() -> None:
    with started(EPOCHS=ENDLESS) as project:
        project.up()
        first_step(project)
        project.run("kill", "server-1")

        took = goes_on(project, lambda: project.up())

        print(f"server-1 killed and started: next update after {took:.1f} s")
        project.stop()
        project.assert_done("worker", *SERVERS)


def test_a_standby_takes_over() -> None:
    with started(EPOCHS=ENDLESS) as project:
        project.run("--profile", "standby", "up", "--detach", "--no-build")
        first_step(project)
        until(lambda: has_standbys(project), "standbys in sync", SECONDS)

        took = goes_on(project, lambda: project.run("kill", "server-1"))

        print(f"server-1 killed: next update after {took:.1f} s")
        assert took < MAX_RECOVERY_SECONDS
        project.stop()
        project.assert_done("worker", "server-0", "standby-0", "standby-1")


def has_standbys(project: Project) -> bool:
    servers = project.status().get("servers", ())
    return [each["standby_state"] for each in servers] == ["in sync"] * len(SERVERS)


def test_fewer_workers_than_needed_end_the_job(tmp_path: Path) -> None:
    """The workers end after the time that servers wait for each other and for workers."""
    impatient = tmp_path / "impatient.yml"
    impatient.write_text(
        "services:\n"
        "  server-0: {restart: 'no', environment: {PS_JOIN_TIMEOUT: 15}}\n"
        "  server-1: {restart: 'no'}\n"
        "  worker: {restart: 'no'}\n"
    )
    with started(impatient) as project:
        project.up("--scale", "worker=1")

        (code,) = project.codes("worker").values()

        assert code == ExitCode.TOO_FEW_WORKERS
        assert "workers: 1 of --min-workers 2 are here" in project.logs("worker")


@pytest.mark.parametrize(
    ("image", "arguments", "message"),
    [
        ("server", ("--ps=server-0:50051", "train.py"), "No such option"),
        ("worker", ("--shard=0/2",), "No such option"),
        ("server", FILES, "/credentials/ca.pem"),
        ("server", ("--insecure", "--data-dir=/missing/data"), "/missing"),
    ],
)
def test_wrong_images_and_missing_volumes_are_named(
    image: str, arguments: tuple[str, ...], message: str
) -> None:
    done = subprocess.run(
        ("docker", "run", "--rm", "--read-only", f"{PREFIX}-{image}", *arguments),
        capture_output=True,
        text=True,
    )

    assert done.returncode == ExitCode.USAGE
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_image_that_does_not_exist_is_named() -> None:
    with started(IMAGE_PREFIX="paramserver-absent") as project:
        done = project.run("up", "--detach", "--no-build", check=False)

    assert done.returncode == 1
    assert "paramserver-absent-server" in done.stderr


def test_containers_share_memory() -> None:
    with started(DEPLOY / "docker-compose.shm.yml") as project:
        project.up()
        project.assert_done("worker", *SERVERS)

        assert project.logs("worker").count('"event": "shared_memory_used", "shards": [0, 1]') == 2
