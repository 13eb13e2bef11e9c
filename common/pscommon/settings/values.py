"""Parsers of setting values from text, and the types of options made of them.

Each parser raises ValueError with a message for the user.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]  # not generic in older releases of click
else:
    ParamType = click.ParamType


Lanes = Literal["auto", "shm", "stream", "grpc"]
LANES = ("auto", "shm", "stream", "grpc")

Durability = Literal["snapshot", "log"]
DURABILITY = ("snapshot", "log")

LogFsync = Literal["always", "everysec", "no"]
LOG_FSYNC = ("always", "everysec", "no")

BadGradients = Literal["skip", "abort", "clip"]
BAD_GRADIENTS = ("skip", "abort", "clip")

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

LONGEST_HOURS = 1000
"""Upper bound of every time, which is transmitted as milliseconds in 32 bits."""

MAX_COUNT = 2**31 - 1
"""Upper bound of every count, which is transmitted in 32 bits."""

MAX_VERSION = 2**63 - 1

FIRST_PORT = 50051
"""Default port of shard 0; that of shard I is the port I above it."""

LAST_PORT = 65535


class ValueType(ParamType):
    """Click type made of a parser.

    Attributes:
        name: placeholder in --help.
        parse: parser of the text.
        besides: TOML types accepted instead of text, the widest last.
    """

    def __init__(self, name: str, parse: Callable[[str], Any], *besides: type) -> None:
        self.name = name
        self.parse = parse
        self.besides = besides

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a value; called by click."""
        try:
            return self.parse(str(value).strip())
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return the placeholder in --help."""
        return self.name


class PathType(click.Path):
    """Path of a file or folder; refuses an empty path, as from an unset shell variable."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check a value; called by click."""
        if value == "":
            self.fail(
                f"the name of the {self.name} is empty; '.' is the current folder", param, ctx
            )
        return super().convert(value, param, ctx)


@dataclass(frozen=True, slots=True)
class SnapshotEvery:
    """Snapshot interval: seconds above 0, or at least 1 step; exactly one of them is set."""

    seconds: float | None = None
    steps: int | None = None

    def __str__(self) -> str:
        return (
            f"{self.steps}steps" if self.steps is not None else f"{_shortest(self.seconds or 0.0)}s"
        )


def snapshot_every(text: str) -> SnapshotEvery:
    """Parse '60s', '10m' or '500steps'."""
    match = re.fullmatch(r"([0-9]+)\s*steps?", text)
    if match and match[1].strip("0"):
        return SnapshotEvery(steps=version(match[1]))
    if text[-1:] in UNITS and _time(text) > 0:
        return SnapshotEvery(seconds=_time(text))
    raise ValueError(f"{text!r} is neither a time (60s, 10m) nor a number of steps (500steps)")


@dataclass(frozen=True, slots=True)
class OnWorkerLoss:
    """Reaction to a lost worker. seconds: time to wait; only for "wait"."""

    mode: Literal["shrink", "wait", "abort"] = "shrink"
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"wait:{_shortest(self.seconds)}" if self.mode == "wait" else self.mode


def on_worker_loss(text: str) -> OnWorkerLoss:
    """Parse 'shrink', 'abort' or 'wait:SECONDS'."""
    if text == "shrink" or text == "abort":
        return OnWorkerLoss("shrink" if text == "shrink" else "abort")
    mode, _, remaining = text.partition(":")
    if mode == "wait" and _time(remaining) > 0:
        return OnWorkerLoss("wait", _time(remaining))
    raise ValueError(f"{text!r} is not shrink, abort or wait:SECONDS (wait:60, wait:5m)")


@dataclass(frozen=True, slots=True)
class WorkerBounds:
    """Smallest and largest number of workers that automatic scaling may choose."""

    smallest: int
    largest: int

    def __str__(self) -> str:
        return f"{self.smallest}..{self.largest}"


def worker_bounds(text: str) -> WorkerBounds:
    """Parse '2..8'."""
    from pscommon.core.limits import WORKERS_PER_GENERATION  # imports numpy

    match = re.fullmatch(r"([0-9]{1,5})\.\.([0-9]{1,5})", text)
    if match and 1 <= int(match[1]) <= int(match[2]) <= WORKERS_PER_GENERATION:
        return WorkerBounds(int(match[1]), int(match[2]))
    raise ValueError(
        f"{text!r} is not MIN..MAX (2..8), with MIN from 1 to MAX and MAX to "
        f"{WORKERS_PER_GENERATION}"
    )


def preemption_notice(text: str) -> str:
    """Check the path of a file or the http address of a metadata server."""
    scheme, separator, place = text.partition("://")
    if not text or (separator and (scheme != "http" or not place.strip("/"))):
        raise ValueError(f"{text!r} is neither the path of a file nor http://HOST/PATH")
    return text


def utf8(text: str) -> str:
    """Check that a text can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text!a} is not UTF-8") from None
    return text


def module(text: str) -> str:
    """Check the dotted name of a Python module."""
    if text.endswith(".py") or not all(part.isidentifier() for part in text.split(".")):
        raise ValueError(f"{text!r} is not a module name. Try: package.module, without .py")
    return text


def count(text: str) -> int:
    """Parse a count of at least 1."""
    return _integer(text, 1, MAX_COUNT)


def count_or_none(text: str) -> int:
    """Parse a count of at least 0."""
    return _integer(text, 0, MAX_COUNT)


def version(text: str) -> int:
    """Parse a version."""
    return _integer(text, 0, MAX_VERSION)


def _integer(text: str, lowest: int, highest: int) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text) or not lowest <= int(text) <= highest:
        raise ValueError(f"{text!r} is not a whole number from {lowest} to {highest}")
    return int(text)


def positive(text: str) -> float:
    """Parse a number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{text!r} is not a number above zero")
    return value


def seconds(text: str) -> float:
    """Parse a positive time; the default unit is seconds: '5', '0.5', '250ms', '10m'."""
    if _time(text) <= 0:
        raise ValueError(f"{text!r} is not a time above zero (5, 5s, 250ms, 10m)")
    return _time(text)


def _time(text: str) -> float:
    """Return the seconds; 0 for a text that is no time. Raise ValueError if it is too long."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)(ms|s|m|h)?", text)
    value = float(match[1]) * UNITS[match[2] or "s"] if match else 0.0
    if value > LONGEST_HOURS * UNITS["h"]:
        raise ValueError(f"{text!r} is longer than {LONGEST_HOURS}h")
    return value


def _shortest(number: float) -> str:
    """Return the shortest text that is parsed as the same number."""
    return repr(number).removesuffix(".0")


def nbytes(text: str) -> int:
    """Parse a positive number of bytes: '500MB', '2GiB'."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([kMGT]?)(i?)B?", text)
    value = (
        float(match[1]) * (1024 if match[3] else 1000) ** " kMGT".index(match[2] or " ")
        if match
        else 0
    )
    if not 1 <= value < 2**63:
        raise ValueError(f"{text!r} is not a number of bytes (500MB, 2GiB)")
    return int(value)


def listening(text: str) -> str:
    """Check HOST:PORT to listen on; port 0 picks a free port."""
    return _address(text, lowest=0)


def address(text: str) -> str:
    """Check HOST:PORT to connect to."""
    return _address(text, lowest=1)


def addresses(text: str) -> str:
    """Check one or more HOST:PORT, separated by commas."""
    parts = [address(part.strip()) for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError("no address")
    if len(set(parts)) < len(parts):
        raise ValueError(f"{text!r} names an address twice")
    return ",".join(parts)


def _address(text: str, lowest: int) -> str:
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"[A-Za-z0-9._-]+", host) and not _is_ipv6(host):
        raise ValueError(
            f"{text!r} is not HOST:PORT (0.0.0.0:PORT listens everywhere, IPv6 is [::1]:PORT)"
        )
    if not re.fullmatch(r"[0-9]{1,5}", port) or not lowest <= int(port) <= 65535:
        raise ValueError(f"{text!r}: the port is a number from {lowest} to 65535")
    return text


def _is_ipv6(host: str) -> bool:
    """Return whether this is an IPv6 address in brackets, also with a scope: [fe80::1%eth0]."""
    try:
        IPv6Address(host[1:-1])
    except ValueError:
        return False
    return host.startswith("[") and host.endswith("]")


def is_ip_address(host: str) -> bool:
    """Return whether the host of a checked address is an IP address, not a name."""
    try:
        IPv4Address(host)
    except ValueError:
        return _is_ipv6(host)
    return True


def host_and_port(where: str) -> tuple[str, int]:
    """Split a checked address; the host keeps its brackets."""
    host, _, port = where.rpartition(":")
    return host, int(port)


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """Index of a shard, from 0, and number of shards."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def shard(text: str) -> ShardIndex:
    """Parse 'I/N' with 0 <= I < N."""
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if not match:
        raise ValueError(f"{text!r} is not I/N, such as 0/2 for the first of two shards")
    index, shards = count_or_none(match[1]), count_or_none(match[2])
    if index >= shards:
        raise ValueError(f"{text!r}: shards are counted from 0, so I is less than N")
    return ShardIndex(index, shards)


def resume(text: str) -> str | int:
    """Parse 'auto', 'never' or the version of a snapshot."""
    if text in ("auto", "never"):
        return text
    if re.fullmatch(r"[0-9]+", text):
        return version(text)
    raise ValueError(f"{text!r} is not auto, never or a version number")


def device(text: str) -> str:
    """Check 'auto', 'cpu', 'cuda' or 'cuda:K'."""
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", text):
        return text
    raise ValueError(f"{text!r} is not auto, cpu, cuda or cuda:K")


class Resources(dict[str, float]):
    """Amounts by name, as Ray counts them."""

    def __str__(self) -> str:
        return ",".join(f"{name}={amount:g}" for name, amount in self.items())


def resources(text: str) -> Resources:
    """Parse 'CPU=4,GPU=1'."""
    found = dict(re.findall(r"(?:^|,)([A-Za-z_]\w*)=([0-9]+(?:\.[0-9]+)?)(?=,|$)", text))
    if not found or len(found) != text.count(",") + 1:
        raise ValueError(f"{text!r} is not a list such as CPU=4,GPU=1")
    return Resources((name, float(number)) for name, number in found.items())


# Types of options, by the placeholder in --help and the TOML types that a file may have.
COUNT = ValueType("INTEGER", count, int)
COUNT_OR_NONE = ValueType("INTEGER", count_or_none, int)
VERSION = ValueType("INTEGER", version, int)
FOLDER = PathType(file_okay=False, path_type=Path)
FILE = PathType(dir_okay=False, path_type=Path)
SECONDS = ValueType("SECONDS", seconds, int, float)
LISTEN = ValueType("HOST:PORT", listening)
ADDRESS = ValueType("HOST:PORT", address)
MODULE = ValueType("MODULE", module)
RESOURCES = ValueType("CPU=N,GPU=N", resources)
TEXT = ValueType("TEXT", utf8)
