"""The manifests of deploy/kubernetes, as kubectl builds them, and their pods."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.support.prometheus_queries import DEPLOY

KUBERNETES = DEPLOY / "kubernetes"
_beside_python = Path(sys.executable).parent / "kubectl"
KUBECTL = str(_beside_python) if _beside_python.exists() else shutil.which("kubectl")

Manifest = Mapping[str, Any]


def build(folder: Path) -> list[Manifest]:
    """Return the resources that `kubectl kustomize` makes of a folder."""
    assert KUBECTL is not None
    done = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def read(path: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(path.read_text()))


def of_kind(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [
        each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return found


class Pod(NamedTuple):
    """One pod of a StatefulSet or indexed Job, with its only container.

    Attributes:
        command: Command and arguments, with the variables that they name.
        environment: Its variables.
        mounts: Kind of each volume by the path at which it is mounted: the key of the volume's
            source, or "volumeClaimTemplate".
        container: The container as the manifest has it.
    """

    name: str
    command: list[str]
    environment: dict[str, str]
    mounts: dict[str, str]
    container: Manifest


def pods_of(manifest: Manifest) -> list[Pod]:
    """Return the pods that a controller makes."""
    spec, name = manifest["spec"], manifest["metadata"]["name"]
    count = spec["replicas"] if manifest["kind"] == "StatefulSet" else spec["completions"]
    return [_pod(spec, f"{name}-{index}", str(index)) for index in range(count)]


def _pod(spec: Manifest, name: str, index: str) -> Pod:
    template = spec["template"]["spec"]
    (container,) = template["containers"]
    fields = {
        "metadata.name": name,
        "metadata.labels['apps.kubernetes.io/pod-index']": index,
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": index,
    }
    environment: dict[str, str] = {}
    for variable in container.get("env", ()):
        text = variable.get("value")
        if text is None:
            text = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        environment[variable["name"]] = _expand(text, environment)
    claims = {each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", ())}
    sources = {each["name"]: next(key for key in each if key != "name") for each in volumes(spec)}
    sources |= dict.fromkeys(claims, "volumeClaimTemplate")
    mounts = {each["mountPath"]: sources[each["name"]] for each in container["volumeMounts"]}
    words = [*container["command"], *container.get("args", ())]
    return Pod(name, [_expand(word, environment) for word in words], environment, mounts, container)


def volumes(spec: Manifest) -> list[Manifest]:
    return list(spec["template"]["spec"].get("volumes", ()))


def _expand(text: str, environment: Mapping[str, str]) -> str:
    """Replace $(NAME) by the variable, as kubelet does; an unknown name stays."""
    return re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), text)


def templates_in(value: Any) -> Iterator[Manifest]:
    """Yield all pod templates inside a resource."""
    if isinstance(value, Mapping):
        if "containers" in value.get("spec", ()):
            yield value
        for each in value.values():
            yield from templates_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from templates_in(each)
