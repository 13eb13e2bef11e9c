"""Validation of arguments and environment variables.

All functions raise InvalidRequestError for an invalid value; its text describes the valid ones.
"""

import operator
import os
import sys
from collections.abc import Collection, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import is_clip_norm
from pscommon.environments.detection import detect, report, surroundings
from pscommon.environments.place import Place
from pscommon.security.settings import TLS_KEYS, SecuritySettings, security_settings
from pscommon.settings.values import LANES, Lanes, seconds
from psworker.core.group_place import GroupPlace

CONNECT_SECONDS = "60"
MAX_RANK = 2**32 - 1

GROUP_VARIABLE = "PS_GROUP"
"""Switched on in the processes of a group, by ps-worker --group."""

ON = ("1", "on", "yes", "true")
OFF = ("", "0", "off", "no", "false")


def check_integer(name: str, value: Any, minimum: int, maximum: int = 2**63 - 1) -> int:
    """Return an integer of Python, numpy or torch in these bounds as a Python integer."""
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if isinstance(value, bool) or not minimum <= number <= maximum:
        raise InvalidRequestError(
            f"{name}={value!r} is not valid. Try: a whole number from {minimum} to {maximum}"
        )
    return number


def clip_norm_of(value: Any) -> float | None:
    """Return the largest L2 norm of an update's averaged gradient; None: no limit."""
    number = value.item() if hasattr(value, "item") else value
    if number is not None and not is_clip_norm(number):
        raise InvalidRequestError(
            f"clip_norm={value!r} is not valid. Try: a finite number above 0, or None for no "
            "clipping"
        )
    return None if number is None else float(number)


def seed_of(value: Any) -> int:
    """Return a 64-bit seed as a signed integer. Seeds that differ by 2**64 are equal."""
    return (check_integer("seed", value, -(2**63), 2**64 - 1) + 2**63) % 2**64 - 2**63


def rank_of(given: int | None, environment: Mapping[str, str]) -> int | None:
    """Return the worker's place in a round's sum: the given one, else PS_WORKER_RANK."""
    if given is None:
        return _from_environment("PS_WORKER_RANK", environment)
    return check_integer("rank", given, 0, MAX_RANK)


def attempt_of(environment: Mapping[str, str]) -> int:
    """Return the number of earlier starts of this process's rank by the launcher."""
    return _from_environment("PS_WORKER_ATTEMPT", environment) or 0


def _from_environment(name: str, environment: Mapping[str, str]) -> int | None:
    text = environment.get(name, "")
    if text and not (text.isascii() and text.isdecimal() and int(text) <= MAX_RANK):
        raise InvalidRequestError(f"{name}={text!r} is not valid. Try: a whole number from 0")
    return int(text) if text else None


def group_place(environ: Mapping[str, str]) -> GroupPlace | None:
    """Return this process's place as torchrun's variables have it; None: it is in no group.

    Raises:
        InvalidRequestError: A variable is missing, or the ranks are those of several machines.
    """
    if not is_on(GROUP_VARIABLE, environ):
        return None
    try:
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise InvalidRequestError(
            "--group needs RANK and WORLD_SIZE. Try: `torchrun --nproc-per-node 4 --no-python "
            "ps-worker --group --ps HOST:PORT SCRIPT`, or `ps-run --group-size 4 SCRIPT`"
        ) from None
    local = environ.get("LOCAL_WORLD_SIZE", str(size))
    if local != str(size):
        raise InvalidRequestError(
            f"a group is the processes of one machine, and here are {local} of {size} ranks. Try: "
            "one torchrun for each machine, without --nnodes"
        )
    if sys.platform != "linux":
        raise InvalidRequestError(f"groups need Linux, and this is {sys.platform}. Try: no --group")
    if not 0 <= rank < size:
        raise InvalidRequestError(f"RANK={rank} is not valid. Try: 0 to {size - 1}")
    return GroupPlace(rank, size)


def detected_worker(wanted: Collection[str], environ: Mapping[str, str]) -> Place | None:
    """Return this worker's place in the engine's environment; None: there is none.

    Args:
        wanted: What no flag or variable PS_* says: "addresses" of servers, "index", "workers".
        environ: The environment of this process.

    Raises:
        InvalidRequestError: The environment is malformed, or does not fit a worker.
    """
    return detect(surroundings()._replace(environ=environ), "worker", wanted) if wanted else None


def use_place(servers: object, rank: int | None, environ: MutableMapping[str, str]) -> int | None:
    """Take from the engine's environment what neither the script nor a variable PS_* names.

    The rank is not put into the environment: Spark and Ray use a process for several tasks.

    Args:
        servers: The servers that the script names.
        rank: The rank that the script names; PS_WORKER_RANK is the next choice.
        environ: The environment of this process; PS_SERVERS is set to the servers.

    Returns:
        The rank; None: the order of joining decides.
    """
    rank = rank_of(rank, environ)
    if is_on("PS_LOCAL", environ):
        return rank
    has_servers = bool(servers or environ.get("PS_SERVERS"))
    wanted = [] if has_servers else ["addresses"]
    wanted += ["index"] if rank is None else []
    place = detected_worker(wanted, environ)
    if place is None:
        return rank
    if place.addresses and not has_servers:
        environ["PS_SERVERS"] = ",".join(place.addresses)
    elif rank is not None or place.index is None:
        return rank
    report(place)
    return place.index if rank is None else rank


def connect_timeout_of(given: float | None, environment: Mapping[str, str]) -> float:
    """Return for how many seconds a server may be silent: as given, else PS_CONNECT_TIMEOUT."""
    if given is not None:
        return time_limit("connect_timeout", given)
    try:
        return seconds(environment.get("PS_CONNECT_TIMEOUT") or CONNECT_SECONDS)
    except ValueError as error:
        raise InvalidRequestError(f"PS_CONNECT_TIMEOUT is not valid: {error}") from error


def time_limit(name: str, given: float) -> float:
    """Return a positive number of seconds, which may be infinite."""
    if isinstance(given, int | float) and given > 0:
        return given
    raise InvalidRequestError(f"{name}={given!r} is not valid. Try: a positive number of seconds")


def lanes_of(given: Lanes | None, environment: Mapping[str, str]) -> Lanes:
    """Return the lane for tensors: the given one, else PS_LANES, else auto."""
    lanes: Any = given or environment.get("PS_LANES") or "auto"
    if lanes not in LANES:
        raise InvalidRequestError(f"lanes {lanes!r} is not valid. Try: one of {', '.join(LANES)}")
    chosen: Lanes = lanes
    return chosen


def security_of(environment: Mapping[str, str]) -> SecuritySettings:
    """Return the security settings of PS_TLS_CA, PS_TLS_CERT, PS_TLS_KEY, PS_TOKEN_FILE and
    PS_INSECURE.
    """
    names = {key: environment.get(f"PS_{key.upper()}") for key in (*TLS_KEYS, "token_file")}
    paths = {key: Path(name) for key, name in names.items() if name}
    return security_settings({**paths, "insecure": is_on("PS_INSECURE", environment)})


def is_on(name: str, environment: Mapping[str, str] | None = None) -> bool:
    """Return whether a variable is switched on; None: in the environment of this process."""
    text = (os.environ if environment is None else environment).get(name, "")
    word = text.strip().lower()
    if word not in ON + OFF:
        raise InvalidRequestError(f"{name}={text} is not valid. Try: {', '.join((*ON, *OFF[1:]))}")
    return word in ON
