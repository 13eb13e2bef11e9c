"""Kinds of values that flags, environment and files give as text: one parser each, ValueError
with a plain sentence.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    ParamType = click.ParamType[
        Any
    ]  # older releases of click have it without the type of its values
else:
    ParamType = click.ParamType

Lanes = Literal["auto", "grpc", "shm"]
LANES = ("auto", "grpc", "shm")

Malloc = Literal["tuned", "system"]
MALLOC = ("tuned", "system")

Durability = Literal["snapshot", "log"]
DURABILITY = ("snapshot", "log")

LogFsync = Literal["always", "everysec", "no"]
LOG_FSYNC = ("always", "everysec", "no")
Shipping = Literal["sync", "async"]
SHIPPING = ("sync", "async")

BadGradients = Literal["skip", "abort", "clip"]
BAD_GRADIENTS = ("skip", "abort", "clip")

LateGradients = Literal["return", "drop"]
LATE_GRADIENTS = ("return", "drop")

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

LONGEST_HOURS = 1000
"""Bound on every time: it travels as milliseconds in 32 bits."""

MOST = 2**31 - 1
"""Bound on what is counted: 32 bits on the wire."""

LAST_VERSION = 2**63 - 1


class ValueType(ParamType):
    """A click type made of a parser. besides: types of TOML for text, the widest last."""

    def __init__(self, name: str, parse: Callable[[str], Any], *besides: type) -> None:
        self.name = name
        self.parse = parse
        self.besides = besides

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Called by click; fails with the parser's sentence."""
        try:
            return self.parse(str(value).strip())
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """What --help shows after the flag."""
        return self.name


class PathType(click.Path):
    """A file or a folder. An empty name, such as an unset variable of a shell leaves, is not the
    current folder.
    """

    def __init__(self, **rest: Any) -> None:
        super().__init__(path_type=Path, **rest)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Called by click."""
        if value == "":
            self.fail(
                f"the name of the {self.name} is empty; '.' is the current folder", param, ctx
            )
        return super().convert(value, param, ctx)


@dataclass(frozen=True, slots=True)
class SnapshotEvery:
    """How often a snapshot is taken: exactly one of `seconds` (> 0) and `steps` (>= 1 versions)
    is set.
    """

    seconds: float | None = None
    steps: int | None = None

    def __str__(self) -> str:
        return (
            f"{self.steps}steps" if self.steps is not None else f"{_shortest(self.seconds or 0.0)}s"
        )


def snapshot_every(text: str) -> SnapshotEvery:
    """'60s', '10m' or '500steps'."""
    match = re.fullmatch(r"([0-9]+)\s*steps?", text)
    if match and match[1].strip("0"):
        return SnapshotEvery(steps=version(match[1]))
    if text[-1:] in UNITS and _time(text) > 0:
        return SnapshotEvery(seconds=_time(text))
    raise ValueError(f"{text!r} is neither a time (60s, 10m) nor a number of steps (500steps)")


@dataclass(frozen=True, slots=True)
class OnWorkerLoss:
    """What happens to the place of a worker that is lost: its mode, and for "wait" how many
    seconds.
    """

    mode: Literal["shrink", "wait", "abort"] = "shrink"
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"wait:{_shortest(self.seconds)}" if self.mode == "wait" else self.mode


def on_worker_loss(text: str) -> OnWorkerLoss:
    """'shrink', 'abort' or 'wait:SECONDS'."""
    if text == "shrink" or text == "abort":
        return OnWorkerLoss("shrink" if text == "shrink" else "abort")
    mode, _, rest = text.partition(":")
    if mode == "wait" and _time(rest) > 0:
        return OnWorkerLoss("wait", _time(rest))
    raise ValueError(f"{text!r} is not shrink, abort or wait:SECONDS (wait:60, wait:5m)")


def utf8(text: str) -> str:
    """Any text that a message can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text!a} is not UTF-8") from None
    return text


def module(text: str) -> str:
    """The dotted name of a Python module."""
    if text.endswith(".py") or not all(part.isidentifier() for part in text.split(".")):
        raise ValueError(f"{text!r} is not the name of a module; give package.module, without .py")
    return text


def count(text: str) -> int:
    """How many, one at least."""
    return _whole(text, 1, MOST)


def count_or_none(text: str) -> int:
    """How many; there may be none."""
    return _whole(text, 0, MOST)


def version(text: str) -> int:
    """A number of updates."""
    return _whole(text, 0, LAST_VERSION)


def _whole(text: str, least: int, most: int) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text) or not least <= int(text) <= most:
        raise ValueError(f"{text!r} is not a whole number from {least} to {most}")
    return int(text)


def positive(text: str) -> float:
    """A number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{text!r} is not a number above zero")
    return value


def seconds(text: str) -> float:
    """A positive number of seconds, or one with a unit: '5', '0.5', '250ms', '10m'."""
    if _time(text) <= 0:
        raise ValueError(f"{text!r} is not a time above zero (5, 5s, 250ms, 10m)")
    return _time(text)


def _time(text: str) -> float:
    """In seconds; 0 for what is no time at all. ValueError for one that is too long."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)(ms|s|m|h)?", text)
    value = float(match[1]) * UNITS[match[2] or "s"] if match else 0.0
    if value > LONGEST_HOURS * UNITS["h"]:
        raise ValueError(f"{text!r} is longer than {LONGEST_HOURS}h")
    return value


def _shortest(number: float) -> str:
    """What is parsed again as the very same number: settings travel to other processes as text."""
    return repr(number).removesuffix(".0")


def nbytes(text: str) -> int:
    """A positive number of bytes, or one with a unit: '500MB', '2GiB'."""
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
    """HOST:PORT to listen on; port 0 asks for a free one."""
    return _address(text, lowest=0)


def address(text: str) -> str:
    """HOST:PORT to connect to."""
    return _address(text, lowest=1)


def addresses(text: str) -> str:
    """One or more HOST:PORT, joined by commas."""
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
    """In its brackets, and with a scope if need be: [fe80::1%eth0]."""
    try:
        IPv6Address(host[1:-1])
    except ValueError:
        return False
    return host.startswith("[") and host.endswith("]")


def host_and_port(where: str) -> tuple[str, int]:
    """Splits a checked address; the host keeps its brackets."""
    host, _, port = where.rpartition(":")
    return host, int(port)


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """Shard `index` of `count`, counted from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def shard(text: str) -> ShardIndex:
    """'I/N' with 0 <= I < N."""
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if not match:
        raise ValueError(f"{text!r} is not I/N, such as 0/2 for the first of two shards")
    index, shards = count_or_none(match[1]), count_or_none(match[2])
    if index >= shards:
        raise ValueError(f"{text!r}: shards are counted from 0, so I is less than N")
    return ShardIndex(index, shards)


def resume(text: str) -> str | int:
    """'auto', 'never' or a snapshot's version."""
    if text in ("auto", "never"):
        return text
    if re.fullmatch(r"[0-9]+", text):
        return version(text)
    raise ValueError(f"{text!r} is not auto, never or a version number")


def device(text: str) -> str:
    """'auto', 'cpu', 'cuda' or 'cuda:K'."""
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", text):
        return text
    raise ValueError(f"{text!r} is not auto, cpu, cuda or cuda:K")


def check_policy(policy: str, staleness: int | None) -> None:
    """ValueError unless the bound fits the policy: ssp needs one, the others have none."""
    if policy == "ssp" and staleness is None:
        raise ValueError(
            "--policy ssp needs --staleness S, the number of steps that a worker may be ahead (0 "
            "acts as sync)"
        )
    if policy != "ssp" and staleness is not None:
        raise ValueError(f"--staleness bounds --policy ssp; {policy} has no bound")
