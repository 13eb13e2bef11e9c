"""The pods of deploy/kubernetes as processes of this machine: their commands, variables and probes.

No cluster is needed. A pod's ports become ports of loopback, its volumes folders, and the names of
the service loopback addresses. What starts pods again is this test.
"""

import re
import shutil
import signal
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pscommon.core.exit_codes import ExitCode
from pscommon.security.certificates import init_tls
from pscommon.security.tokens import init_tokens
from tests.support.ports import free_ports
from tests.support.programs import Program, Programs, programs_in
from tests.support.workers import until

pytest.importorskip("yaml", reason="not installed: make setup")

from tests.support import kubernetes
from tests.support.kubernetes import KUBERNETES, Pod, pods_of

pytestmark = [
    pytest.mark.skipif(kubernetes.KUBECTL is None, reason="kubectl is not installed"),
    pytest.mark.timeout(600),
]

SERVICE = "paramserver"
SECONDS = 120
PORTS = {50051: 0, 9464: 1}
"""Port of a container, and its position among the ports that stand for those of a pod."""


class Cluster:
    """Runs pods. A pod keeps its ports and the folders of its claims, as in a cluster."""

    def __init__(self, programs: Programs, folder: Path, *arguments: str) -> None:
        manifests = kubernetes.build(KUBERNETES / "base")
        self.servers = pods_of(kubernetes.of_kind(manifests, "StatefulSet", SERVICE))
        self.workers = pods_of(kubernetes.of_kind(manifests, "Job", "paramserver-worker"))
        self.running: dict[str, Program] = {}
        self._programs, self._folder, self._arguments = programs, folder, arguments
        pods = (*self.servers, *self.workers)
        self._ports = {pod.name: free_ports(len(PORTS)) for pod in pods}
        self._secret = folder / "secret"
        init_tls(self._secret)
        init_tokens(self._secret)

    def start(self, *pods: Pod) -> None:
        for pod in pods:
            extra = self._arguments if pod in self.workers else ()
            command = [*(self._here(word, pod) for word in pod.command), *extra]
            variables = {name: self._here(text, pod) for name, text in pod.environment.items()}
            self.running[pod.name] = self._programs.start(*command, **variables)

    def kill(self, pod: Pod) -> None:
        self.running[pod.name].send(signal.SIGKILL)
        self.running[pod.name].wait()

    def claim(self, pod: Pod) -> Path:
        """Return the folder of the volume that a pod claims."""
        (path,) = [path for path, kind in pod.mounts.items() if kind == "volumeClaimTemplate"]
        return self._folder_of(pod, path)

    def passes(self, pod: Pod, probe: str) -> bool:
        """Run a probe of the manifest, as kubelet does: without verifying the certificate."""
        get = pod.container[probe]["httpGet"]
        number = next(
            each["containerPort"] for each in pod.container["ports"] if each["name"] == get["port"]
        )
        address = f"127.0.0.1:{self._ports[pod.name][PORTS[number]]}"
        https = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), https)
        try:
            with opener.open(f"{get['scheme'].lower()}://{address}{get['path']}", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _here(self, text: str, pod: Pod) -> str:
        """Replace ports, names and paths in a word by those that stand for them here."""
        for server in self.servers:
            for port, position in PORTS.items():
                text = text.replace(
                    f"{server.name}.{SERVICE}:{port}",
                    f"127.0.0.1:{self._ports[server.name][position]}",
                )
        for port, position in PORTS.items():
            text = text.replace(f"0.0.0.0:{port}", f"127.0.0.1:{self._ports[pod.name][position]}")
        # all at once: a folder may have the name of another mount
        paths = "|".join(map(re.escape, pod.mounts))
        return re.sub(
            rf"(^|=)({paths})(?=/|$)",
            lambda found: f"{found[1]}{self._folder_of(pod, found[2])}",
            text,
        )

    def _folder_of(self, pod: Pod, path: str) -> Path:
        if pod.mounts[path] == "secret":
            return self._secret
        folder = self._folder / pod.name / path.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        yield programs


@pytest.fixture
def cluster(programs: Programs, tmp_path: Path) -> Cluster:
    """All pods of a job that trains long enough to lose some."""
    cluster = Cluster(programs, tmp_path, "--epochs=40")
    cluster.start(*cluster.servers, *cluster.workers)
    return cluster


def test_pods_train_and_their_probes_pass(cluster: Cluster) -> None:
    """A server is alive before it is ready. The servers outlive the job, and end when told."""
    for pod in (*cluster.servers, *cluster.workers):
        until(lambda pod=pod: cluster.passes(pod, "startupProbe"), f"{pod.name} started", SECONDS)
        assert cluster.passes(pod, "livenessProbe")
    for pod in cluster.servers:
        until(lambda pod=pod: cluster.passes(pod, "readinessProbe"), f"{pod.name} ready", SECONDS)

    for pod in cluster.workers:
        assert cluster.running[pod.name].wait(SECONDS) == ExitCode.DONE
    assert "test accuracy 0.9" in cluster.running[cluster.workers[0].name].output
    assert all(cluster.passes(pod, "readinessProbe") for pod in cluster.servers)
    for pod in cluster.servers:
        cluster.running[pod.name].send(signal.SIGTERM)
    for pod in cluster.servers:
        assert cluster.running[pod.name].wait() == ExitCode.TERMINATED


@pytest.mark.parametrize("shard", [0, 1])
def test_a_server_goes_on_with_its_volume(cluster: Cluster, shard: int) -> None:
    """No update is lost: the manifest has a log."""
    server, worker = cluster.servers[shard], cluster.running[cluster.workers[0].name]
    worker.wait_for("epoch 3:", seconds=SECONDS)

    cluster.kill(server)
    cluster.start(server)

    cluster.running[server.name].wait_for("from_log" if shard == 0 else "coordinator_connected")
    for pod in cluster.workers:
        assert cluster.running[pod.name].wait(SECONDS) == ExitCode.DONE
    # no epoch was trained again
    epochs = re.findall(r"^epoch (\d+):", worker.output, re.M)
    assert epochs == [str(number) for number in range(40)]


def test_a_worker_is_replaced(cluster: Cluster) -> None:
    lost, other = cluster.workers
    cluster.running[lost.name].wait_for("epoch 3:", seconds=SECONDS)

    cluster.kill(lost)
    cluster.start(lost)

    for pod in (lost, other):
        assert cluster.running[pod.name].wait(SECONDS) == ExitCode.DONE


@pytest.mark.parametrize("shard", [0, 1])
def test_a_server_with_an_empty_volume_ends_the_job(cluster: Cluster, shard: int) -> None:
    """Nothing is trained from scratch, also if the pods start again. The volume repairs it."""
    first, second = cluster.servers
    claim = cluster.claim(cluster.servers[shard])
    cluster.running[cluster.workers[0].name].wait_for("epoch 3:", seconds=SECONDS)
    cluster.running[first.name].send(signal.SIGTERM)  # with a snapshot
    cluster.running[first.name].wait()
    cluster.kill(second)
    lost = claim.rename(claim.with_name("lost"))

    for _ in range(2):
        cluster.start(first, second)
        for pod in cluster.servers:
            assert cluster.running[pod.name].wait(SECONDS) == ExitCode.NO_SNAPSHOT

    shutil.rmtree(claim)
    lost.rename(claim)
    for pod in cluster.workers:  # they wait for the servers, or were told that these have failed
        cluster.running[pod.name].end()
    cluster.start(first, second, *cluster.workers)
    for pod in cluster.workers:
        assert cluster.running[pod.name].wait(SECONDS) == ExitCode.DONE
    output = "".join(cluster.running[pod.name].output for pod in cluster.workers)
    assert "epoch 39:" in output
    assert "epoch 0:" not in output
