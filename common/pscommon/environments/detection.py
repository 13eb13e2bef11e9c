"""Which environment a process is in, and what all of them together say about its place.

The first environment of ENVIRONMENTS that says something wins. Later ones add what it leaves open,
such as the servers' addresses, and must not contradict it. Those of INNER start processes inside
the others: the index and the count of an outer environment are then those of another process.
"""

import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from pscommon.core.errors import InvalidRequestError
from pscommon.environments import kubernetes, processes, slurm, tf_config, torchrun
from pscommon.environments.place import Place, Role, Surroundings
from pscommon.telemetry.logs import get_logger

log = get_logger(__name__)

INNER: tuple[Callable[[Surroundings, Role | None], Place | None], ...] = (
    torchrun.torchrun,
    processes.spark,
    processes.ray,
)
ENVIRONMENTS = (
    *INNER,
    tf_config.tf_config,
    tf_config.cluster_spec,
    kubernetes.named_servers,
    kubernetes.trainer,
    kubernetes.indexed_job,
    slurm.slurm,
)
"""All environments, the first one that matches wins."""

FLAGS: Mapping[Role, Mapping[str, str]] = {
    "server": {
        "index": "`--shard I/N` (PS_SHARD)",
        "servers": "`--shard I/N` (PS_SHARD)",
        "workers": "`--min-workers N` (PS_MIN_WORKERS)",
        "addresses": "`--join HOST:PORT` (PS_JOIN)",
    },
    "worker": {
        "index": "`--worker-rank N` (PS_WORKER_RANK)",
        "workers": "`--worker-count N` (PS_WORKER_COUNT)",
        "addresses": "`--ps HOST:PORT` (PS_SERVERS)",
    },
}
"""The facts that a command asks for, with the flag that decides in place of the environments."""

ROLE_FACTS: Mapping[Role, str] = {"server": "index", "worker": "addresses"}
"""The fact whose flag says that a process has a role, whatever the environment says."""

NAMES = {
    "index": "index",
    "servers": "number of servers",
    "workers": "number of workers",
    "addresses": "addresses of servers",
}


def surroundings() -> Surroundings:
    """Return those of this process."""
    return Surroundings(os.environ, socket.gethostname(), sys.modules)


def report(place: Place | None) -> None:
    """Log what was detected."""
    if place is not None:
        log.info(
            "environment_detected",
            environment=place.environment,
            role=place.role,
            index=place.index,
            servers=place.servers,
            workers=place.workers,
            addresses=",".join(place.addresses) or None,
            variables=", ".join(place.variables),
        )


def find(here: Surroundings, role: Role | None) -> list[Place]:
    """Return the places in all environments that match, in order.

    Args:
        here: What is read.
        role: The role that the command has; None: unknown.

    Raises:
        InvalidRequestError: A variable is malformed.
    """
    found: list[Place] = []
    is_inside = False
    for environment in ENVIRONMENTS:
        place = environment(here, role)
        if place is None:
            continue
        if is_inside:
            place = replace(place, role=None, index=None, workers=None, address=None)
        is_inside = is_inside or environment in INNER
        found.append(place)
    return found


def detect(here: Surroundings, role: Role, wanted: Collection[str]) -> Place | None:
    """Return what all environments say about a process; None: there is no environment.

    Args:
        here: What is read.
        role: The role that the command has.
        wanted: Facts that no flag gives, of FLAGS[role]. Others may contradict each other.

    Raises:
        InvalidRequestError: A variable is malformed, two environments contradict each other, the
            process has another role, or a cluster has no servers.
    """
    return merged(find(here, role), role, wanted)


def merged(places: Sequence[Place], role: Role, wanted: Collection[str]) -> Place | None:
    """Return the first place, with what it leaves open from the others.

    Raises:
        InvalidRequestError: As of `detect`, apart from malformed variables.
    """
    same = [place for place in places if place.role in (None, role)]
    if len(same) < len(places) and ROLE_FACTS[role] in wanted:
        other = next(place for place in places if place not in same)
        raise InvalidRequestError(
            f"{other.environment} says that this process is a {other.role}, and ps-{role} runs as "
            f"a {role}. Try: ps-{other.role} here, or {FLAGS[role][ROLE_FACTS[role]]}"
        )
    for one, other in combinations(same, 2):
        _check_agreement(one, other, role, wanted)
    if not same:
        return None
    first, *others = same
    for place in others:
        first = replace(
            first,
            environment=f"{first.environment}, {place.environment}",
            variables=(*first.variables, *place.variables),
            **{
                fact: getattr(place, fact)
                for fact in (*NAMES, "address")
                if getattr(first, fact) in (None, ())
            },
        )
    if role == "worker" and first.servers == 0 and "addresses" in wanted:
        raise InvalidRequestError(
            f"{first.environment} names no servers: a job with parameter servers needs `ps` "
            "entries. Try: replicas of type PS in the TFJob, a third worker pool on Vertex AI, or "
            f"{FLAGS[role]['addresses']}"
        )
    return replace(first, role=role)


def _check_agreement(one: Place, other: Place, role: Role, wanted: Collection[str]) -> None:
    for fact, flag in FLAGS[role].items():
        first, second = getattr(one, fact), getattr(other, fact)
        if fact == "addresses":
            count = min(len(first), len(second))
            first, second = ", ".join(first[:count]), ", ".join(second[:count])
        if fact in wanted and None not in (first, second) and first != second:
            raise InvalidRequestError(
                f"two environments contradict each other on the {NAMES[fact]} of this {role}: "
                f"{one.environment} ({', '.join(one.variables)}) says {first}, "
                f"{other.environment} ({', '.join(other.variables)}) says {second}. Try: {flag}, "
                "or unset the wrong one"
            )
