"""deploy/kubernetes and deploy/vertex-ai: kustomize builds them, and they have the documented form.

Kubernetes' own resources are compared with its schemas, misspelt fields included. There is no
schema of the others: FIELDS has the names of their fields, from the Go types of Kubeflow Trainer
v2, JobSet v1alpha2 and the Prometheus operator, TFJob's CRD, and the reference of Vertex AI.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pscommon.core.exit_codes import ExitCode
from pscommon.security.certificates import init_tls
from pscommon.security.tokens import init_tokens
from psserver.cli import COMMAND as SERVER
from psworker.cli import COMMAND as WORKER

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="not installed: make setup")

from tests.support import kubernetes  # noqa: E402
from tests.support.kubernetes import KUBERNETES, Manifest, pods_of, templates_in  # noqa: E402
from tests.support.prometheus_queries import DEPLOY  # noqa: E402

VERSIONS = ("1.31", "1.37")
"""The oldest release that has all that is used here, and the newest one."""

TRY_AGAIN = {ExitCode.DONE, ExitCode.BUG, ExitCode.UNREACHABLE, ExitCode.TOO_FEW_WORKERS}
"""Exit codes after which another pod may succeed; so it may after a signal."""

OPAQUE: Mapping[str, Any] = {}
"""Any content: checked elsewhere, or free."""

SELECTOR = {"matchLabels": OPAQUE}
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "PodMonitor": {
        "jobLabel": OPAQUE,
        "selector": SELECTOR,
        "podMetricsEndpoints": {
            "port": OPAQUE,
            "scheme": OPAQUE,
            "interval": OPAQUE,
            "tlsConfig": {"ca": {"secret": {"name": OPAQUE, "key": OPAQUE}}, "serverName": OPAQUE},
            "authorization": {"credentials": {"name": OPAQUE, "key": OPAQUE}},
        },
    },
    "ClusterTrainingRuntime": {
        "mlPolicy": {"numNodes": OPAQUE},
        "template": {
            "spec": {
                "network": {"publishNotReadyAddresses": OPAQUE},
                "successPolicy": {"operator": OPAQUE, "targetReplicatedJobs": OPAQUE},
                "replicatedJobs": {"name": OPAQUE, "template": OPAQUE},
            }
        },
    },
    "TrainJob": {
        "runtimeRef": {"name": OPAQUE},
        "trainer": {"numNodes": OPAQUE, "args": OPAQUE, "resourcesPerNode": OPAQUE},
    },
    "TFJob": {
        "successPolicy": OPAQUE,
        "runPolicy": {"cleanPodPolicy": OPAQUE, "backoffLimit": OPAQUE},
        "tfReplicaSpecs": {
            kind: {"replicas": OPAQUE, "restartPolicy": OPAQUE, "template": OPAQUE}
            for kind in ("PS", "Worker")
        },
    },
    "CustomJob": {
        "workerPoolSpecs": {
            "replicaCount": OPAQUE,
            "machineSpec": {"machineType": OPAQUE},
            "containerSpec": {"imageUri": OPAQUE, "command": OPAQUE, "args": OPAQUE, "env": OPAQUE},
        }
    },
}


def base() -> list[Manifest]:
    return kubernetes.build(KUBERNETES / "base")


def everything() -> list[Manifest]:
    return kubernetes.build(KUBERNETES / "overlays/all")


def kubeflow() -> list[Manifest]:
    return [
        each
        for path in sorted((KUBERNETES / "kubeflow").glob("*.yaml"))
        for each in kubernetes.read(path)
    ]


def custom_job() -> list[Manifest]:
    (job,) = kubernetes.read(DEPLOY / "vertex-ai/custom-job.yaml")
    return [{"kind": "CustomJob", "spec": job}]


def unknown(value: Any, fields: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the paths of fields that are not in the table."""
    if fields is OPAQUE:
        return []
    if isinstance(value, list):
        return [name for each in value for name in unknown(each, fields, path)]
    return [
        name
        for key, inner in value.items()
        for name in (
            unknown(inner, fields[key], f"{path}.{key}") if key in fields else [f"{path}.{key}"]
        )
    ]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifests", [base, everything])
def test_resources_have_the_form_of_their_schema(
    manifests: Callable[[], list[Manifest]], version: str
) -> None:
    for manifest in manifests():
        if manifest["kind"] not in FIELDS:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_a_misspelt_field_is_found() -> None:
    manifest = dict(kubernetes.of_kind(base(), "StatefulSet", "paramserver"))
    manifest["spec"] = {**manifest["spec"], "replica": 2}

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    assert unknown({"jobLabl": ""}, FIELDS["PodMonitor"]) == [".jobLabl"]


@pytest.mark.parametrize("manifests", [everything, kubeflow, custom_job])
def test_resources_without_a_schema_have_documented_fields(
    manifests: Callable[[], list[Manifest]],
) -> None:
    found = [each for each in manifests() if each["kind"] in FIELDS]

    assert found
    assert not [name for each in found for name in unknown(each["spec"], FIELDS[each["kind"]])]


def test_pods_of_kubeflow_have_the_form_of_their_schema() -> None:
    """Their jobs and pods are resources of Kubernetes."""
    runtime = kubernetes.of_kind(kubeflow(), "ClusterTrainingRuntime", "paramserver")
    jobs = [each["template"] for each in runtime["spec"]["template"]["spec"]["replicatedJobs"]]
    tf_job = kubernetes.of_kind(kubeflow(), "TFJob", "digits")
    jobs += [
        {"spec": {"template": {"spec": {"restartPolicy": "Never", **replicas["template"]["spec"]}}}}
        for replicas in tf_job["spec"]["tfReplicaSpecs"].values()
    ]

    assert len(jobs) == 4
    for job in jobs:
        manifest = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **job}
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("manifests", [base, everything, kubeflow])
def test_no_pod_has_more_rights_than_it_needs(manifests: Callable[[], list[Manifest]]) -> None:
    templates = [each for manifest in manifests() for each in templates_in(manifest)]

    assert len(templates) >= 2
    for template in templates:
        spec = template["spec"]
        security, (container,) = spec["securityContext"], spec["containers"]
        own = container["securityContext"]
        assert security["runAsNonRoot"]
        assert (security["runAsUser"], security["fsGroup"]) == (10001, 10001)
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert own["readOnlyRootFilesystem"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert spec["automountServiceAccountToken"] is False
        assert {"requests", "limits"} <= {*container["resources"]}
        modes = [each["secret"]["defaultMode"] for each in spec["volumes"] if "secret" in each]
        assert modes == [0o440]


@pytest.mark.parametrize("manifests", [base, everything, kubeflow])
def test_only_livez_restarts_a_container(manifests: Callable[[], list[Manifest]]) -> None:
    """A server without weights is not ready, and must be found nevertheless."""
    found = manifests()
    for template in (each for manifest in found for each in templates_in(manifest)):
        (container,) = template["spec"]["containers"]
        assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
        assert container["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"
    services = [each["spec"] for each in found if each["kind"] == "Service"]
    assert all(each["publishNotReadyAddresses"] for each in services)


def test_a_job_fails_with_the_exit_codes_that_no_other_try_can_change() -> None:
    permanent = sorted(int(code) for code in {*ExitCode} - TRY_AGAIN if code < 128)
    job = kubernetes.of_kind(base(), "Job", "paramserver-worker")["spec"]
    runtime = kubernetes.of_kind(kubeflow(), "ClusterTrainingRuntime", "paramserver")["spec"]
    jobs = [each["template"]["spec"] for each in runtime["template"]["spec"]["replicatedJobs"]]

    for spec in (job, *jobs):
        ignored, failed = spec["podFailurePolicy"]["rules"]
        assert ignored["action"] == "Ignore"
        assert failed["action"] == "FailJob"
        assert failed["onExitCodes"]["values"] == permanent
        assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_commands_accept_the_arguments_and_find_each_other() -> None:
    """All servers have one job's flags; the workers know all servers."""
    manifests = base()
    servers = pods_of(kubernetes.of_kind(manifests, "StatefulSet", "paramserver"))
    workers = pods_of(kubernetes.of_kind(manifests, "Job", "paramserver-worker"))
    settings = [SERVER.make_context("ps-server", pod.command[1:]).params for pod in servers]
    service = kubernetes.of_kind(manifests, "Service", "paramserver")

    assert [str(pod.command[1]) for pod in servers] == ["--shard=0/2", "--shard=1/2"]
    addresses = [f"{pod.name}.{service['metadata']['name']}:50051" for pod in servers]
    assert [each["advertise"] for each in settings] == addresses
    assert {each["join"] for each in settings} == {addresses[0]}
    assert settings[0]["min_workers"] == len(workers)
    for rank, pod in enumerate(workers):
        found = WORKER.make_context("ps-worker", pod.command[1:]).params
        assert (found["ps"], found["worker_rank"]) == (",".join(addresses), rank)


def test_secrets_have_the_files_that_ps_ctl_makes(tmp_path: Path) -> None:
    made = {path.name for path in (*init_tls(tmp_path), *init_tokens(tmp_path))}
    files = {
        Path(variable["value"]).name
        for manifest in (*base(), *kubeflow())
        for template in templates_in(manifest)
        for variable in template["spec"]["containers"][0]["env"]
        if variable.get("value", "").startswith("/credentials/")
    }

    assert files == {
        "ca.pem", "cert.pem", "key.pem", "client-cert.pem", "client-key.pem", "tokens"
    }  # fmt: skip
    assert files <= made


def test_the_autoscaler_changes_what_can_be_scaled() -> None:
    manifests = everything()
    scaler = kubernetes.of_kind(manifests, "HorizontalPodAutoscaler", "paramserver-workers")["spec"]
    target = scaler["scaleTargetRef"]
    workers = kubernetes.of_kind(manifests, target["kind"], target["name"])["spec"]
    labels = workers["template"]["metadata"]["labels"]
    (container,) = workers["template"]["spec"]["containers"]

    assert target["kind"] == "Deployment"
    assert "replicas" not in workers
    assert labels.items() >= workers["selector"]["matchLabels"].items()
    assert not [word for word in container["args"] if "rank" in word]
    (metric,) = scaler["metrics"]
    assert metric["external"]["metric"]["name"] == "ps_workers_wanted"
