"""What an environment says about one process, and the parsing that all environments share."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pscommon.core.errors import InvalidRequestError
from pscommon.settings import values

Role = Literal["server", "worker"]

MAX_HOSTS_COUNT = 65536
"""Names that one expression may stand for; more are a mistake."""

NUMBER = re.compile(r"[0-9]{1,9}")
RANGES = re.compile(r"\[([0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*)\]")


class Surroundings(NamedTuple):
    """What detection reads of a process.

    Attributes:
        environ: Environment variables.
        host_name: Name of the machine, the container or the pod.
        modules: Imported modules by name, as sys.modules.
    """

    environ: Mapping[str, str]
    host_name: str = ""
    modules: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a process in its job, as far as an environment tells.

    Attributes:
        environment: Name of the environment.
        variables: The variables that it was read from.
        role: None: the environment does not distinguish servers from workers.
        index: Shard of a server, rank of a worker.
        servers: Number of servers.
        workers: Number of workers that start together.
        addresses: HOST:PORT of servers, shard 0 first; some may be missing at the end.
        address: HOST:PORT at which others reach this server.
    """

    environment: str
    variables: tuple[str, ...]
    role: Role | None = None
    index: int | None = None
    servers: int | None = None
    workers: int | None = None
    addresses: tuple[str, ...] = ()
    address: str | None = None

    def __str__(self) -> str:
        """Describe the place in a few words."""
        role = "shard" if self.role == "server" else "worker" if self.role else "index"
        count = {"server": self.servers, "worker": self.workers}.get(self.role or "")
        words = [] if self.index is None else [f"{role} {self.index}"]
        words += [f"of {count}"] if words and count is not None else []
        parts = [" ".join(words)] if words else []
        parts += [f"servers {', '.join(self.addresses)}"] if self.addresses else []
        return "; ".join(parts) or "nothing about the place of this process"


def number_in(environ: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable; None: it is not set.

    Raises:
        InvalidRequestError: It is no number from 0.
    """
    text = environ.get(name, "").strip()
    if text and not NUMBER.fullmatch(text):
        raise InvalidRequestError(
            f"{name}={text!r} is not valid. Try: a whole number from 0, or unset it"
        )
    return int(text) if text else None


def check_index(name: str, index: int, count: int | None) -> int:
    """Return an index that is below the count.

    Raises:
        InvalidRequestError: It is not.
    """
    if count is not None and index >= count:
        raise InvalidRequestError(
            f"{name}={index} is not valid: indices are 0 to {count - 1}. Try: correct or unset it"
        )
    return index


def expand_hosts(name: str, text: str) -> tuple[str, ...]:
    """Return the hosts that an expression of Slurm names, such as node[01-03,7],login1.

    A pair of brackets without numbers, as in an IPv6 address, is part of the name.

    Raises:
        InvalidRequestError: The variable `name` has no host, or a range is not valid.
    """
    hosts: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text.strip()):
        for host in _expand(part.strip()):
            hosts.append(host)
            if len(hosts) > MAX_HOSTS_COUNT:
                raise _not_hosts(name, text)
    if not all(hosts) or not hosts:
        raise _not_hosts(name, text)
    return tuple(hosts)


def _expand(text: str) -> Iterator[str]:
    match = RANGES.search(text)
    if match is None:
        yield text
        return
    for part in match[1].split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers:
            yield ""  # refused by the caller
        for number in numbers:
            middle = str(number).zfill(len(first))
            yield from _expand(text[: match.start()] + middle + text[match.end() :])


def _not_hosts(name: str, text: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name}={text[:60]!r} is not a list of hosts. Try: names with ranges, such as "
        "node[01-03],login1"
    )


def check_addresses(name: str, addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return addresses that are all HOST:PORT, each once.

    Raises:
        InvalidRequestError: One is not; `name` is the variable.
    """
    try:
        values.addresses(",".join(addresses))
    except ValueError as error:
        raise InvalidRequestError(
            f"{name} has no valid addresses: {error}. Try: HOST:PORT for each server"
        ) from error
    return addresses
