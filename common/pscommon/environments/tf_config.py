"""TF_CONFIG of TFJob and Vertex AI, and CLUSTER_SPEC of Vertex AI.

`ps` entries are servers, `worker` entries are workers, `chief` (in old releases `master`) is
worker 0. CLUSTER_SPEC names its entries by the positions of the worker pools, which Vertex AI's
page "Distributed training" defines: primary replica, workers, parameter servers, evaluators.
"""

import json
from typing import Any

from pscommon.core.errors import InvalidRequestError
from pscommon.environments.place import Place, Role, Surroundings, check_addresses

TASKS = ("ps", "worker", "chief", "master")
POOLS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps"}


def tf_config(here: Surroundings, role: Role | None) -> Place | None:
    """Return the place in TF_CONFIG.

    Raises:
        InvalidRequestError: TF_CONFIG is malformed.
    """
    name = "TF_CONFIG"
    if not here.environ.get(name):
        return None
    document = _document(name, here.environ[name])
    return _place(name, document["cluster"], document["task"])


def cluster_spec(here: Surroundings, role: Role | None) -> Place | None:
    """Return the place in the CLUSTER_SPEC of Vertex AI; None: it is that of another engine.

    Raises:
        InvalidRequestError: CLUSTER_SPEC is malformed.
    """
    name = "CLUSTER_SPEC"
    if "workerpool0" not in here.environ.get(name, ""):
        return None
    document = _document(name, here.environ[name])
    cluster = {POOLS.get(pool, pool): hosts for pool, hosts in document["cluster"].items()}
    task = document["task"]
    return _place(name, cluster, {**task, "type": POOLS.get(task.get("type"), task.get("type"))})


def _document(name: str, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequestError(
            f"{name} is not valid: it is no JSON. Try: correct it, or unset it"
        ) from None
    parts = ("cluster", "task")
    if not isinstance(document, dict) or not all(
        isinstance(document.get(part), dict) for part in parts
    ):
        raise InvalidRequestError(
            f"{name} is not valid: it has no cluster or no task. Try: both as JSON objects, as "
            "TFJob and Vertex AI set them, or unset it"
        )
    return document


def _place(name: str, cluster: dict[str, Any], task: dict[str, Any]) -> Place:
    lists: dict[str, tuple[str, ...]] = {}
    for kind in TASKS:
        hosts = cluster.get(kind, [])
        if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            raise InvalidRequestError(
                f"{name} is not valid: its {kind} entries are no list of texts. Try: HOST:PORT for "
                "each task"
            )
        lists[kind] = tuple(hosts)
    kind, index = str(task.get("type")), _index(name, task.get("index", 0))
    if kind not in TASKS:
        raise InvalidRequestError(
            f"{name} says that this process is of type {kind[:40]!r}, neither server nor "
            f"worker. Try: one of {', '.join(TASKS)}, or flags and an unset {name}"
        )
    if index >= len(lists[kind]):
        raise InvalidRequestError(
            f"{name} is not valid: task {kind} {index} has no entry in its cluster of "
            f"{len(lists[kind])}. Try: correct it, or unset it"
        )
    addresses = check_addresses(name, lists["ps"]) if lists["ps"] else ()
    first = len(lists["chief"] or lists["master"])
    is_server = kind == "ps"
    return Place(
        environment=name,
        variables=(name,),
        role="server" if is_server else "worker",
        index=index + first if kind == "worker" else index,
        servers=len(addresses),
        workers=first + len(lists["worker"]),
        addresses=addresses,
        address=addresses[index] if is_server else None,
    )


def _index(name: str, value: Any) -> int:
    """Return the index of a task; some engines write it as text."""
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise InvalidRequestError(
            f"{name} is not valid: the index of its task is {text[:40]!r}. Try: a whole number "
            "from 0"
        )
    return int(text)
