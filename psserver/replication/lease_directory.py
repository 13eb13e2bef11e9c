"""The primary lease as files in a directory that primary and standby share."""

import contextlib
import json
import os
import uuid
from dataclasses import replace
from pathlib import Path

import grpc

from pscommon.core.errors import TakenError
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.requests import DESCRIBE, Stub
from psproto.v1.parameter_server_pb2 import DescribeRequest
from psserver.core.shard.failover import LeaseStore, PrimaryRecord, acquire_primary_record
from psserver.process.config import ServerConfig

LOSS_CONFIRMATION_FILE = "standby-is-gone"
"""File with which an operator confirms that the standby that may take over is permanently lost.

The term stays and grows: a server that restarted with term 1 would be refused by all that know a
later term.
"""

ANSWER_TIMEOUT_SECONDS = 3.0
"""Time for the current primary to answer; a stopped process does not answer."""


class LeaseDirectory:
    """One numbered file per record; the highest number counts (core/shard/failover.py:
    LeaseStore).

    A swap links a complete file to the next number, which fails if another process did so first.
    So no process waits for a lock whose owner was stopped. The folder is created. All methods may
    raise OSError.
    """

    def __init__(self, folder: Path, shard: int) -> None:
        self._folder = folder / f"shard-{shard}"
        self._folder.mkdir(parents=True, exist_ok=True)

    def read(self) -> PrimaryRecord | None:
        while number := self._newest():
            with contextlib.suppress(FileNotFoundError):  # a newer record has replaced it
                return self._read(number)
        return None

    def swap(self, old: PrimaryRecord | None, new: PrimaryRecord) -> bool:
        number = self._newest()
        try:
            found = self._read(number) if number else None
        except FileNotFoundError:
            return False  # a newer record has replaced it
        if found != old:
            return False
        temporary = self._folder / f"{uuid.uuid4().hex}.tmp"
        try:
            _write(
                temporary,
                json.dumps({"term": new.term, "holder": new.holder, "in_sync": new.in_sync}),
            )
            os.link(temporary, self._path(number + 1))
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        # a slow process may have created a number again that was removed since: the highest counts
        won = self._newest() == number + 1
        (self._path(number) if won else self._path(number + 1)).unlink(missing_ok=True)
        return won

    def apply_loss_confirmation(self) -> None:
        """Mark the standby as not in sync if an operator has confirmed its loss."""
        marker, found = self._folder / LOSS_CONFIRMATION_FILE, self.read()
        if marker.exists():
            if found is not None:
                self.swap(found, replace(found, in_sync=""))
            marker.unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:09d}.json"

    def _newest(self) -> int:
        """Return the highest number; 0 without a file."""
        return max((int(path.stem) for path in self._folder.glob("*.json")), default=0)

    def _read(self, number: int) -> PrimaryRecord:
        raw = json.loads((path := self._path(number)).read_text())
        try:
            return PrimaryRecord(raw["term"], raw["holder"], raw.get("in_sync", ""))
        except KeyError as missing:
            raise ValueError(f"{path} has no key {missing}") from missing


def _write(path: Path, text: str) -> None:
    """Write a file that is on the disk when this returns.

    After a power cut, an unreadable record would keep all servers away.
    """
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def lease_of(config: ServerConfig) -> LeaseDirectory | None:
    """Return the lease directory of a server; None without --failover-lock.

    Raises TakenError if the directory cannot be used.
    """
    if config.failover_lock is None:
        return None
    try:
        return LeaseDirectory(config.failover_lock, config.shard)
    except OSError as error:
        raise TakenError(
            f"--failover-lock {config.failover_lock} cannot be used: {error}"
        ) from error


def begin_primary(
    config: ServerConfig, lease: LeaseDirectory | None, address: str
) -> PrimaryRecord:
    """Return the record by which a server that was started as primary is primary.

    Raises TakenError if the server must not be primary, or the lease cannot be used.
    """
    try:
        _check_holder(config, lease, address)
        if lease is not None:
            lease.apply_loss_confirmation()
        primary_record = acquire_primary_record(lease, address)
    except (OSError, ValueError, TypeError) as error:
        raise TakenError(
            f"--failover-lock {config.failover_lock} cannot be used: {error}"
        ) from error
    if primary_record is None:
        raise TakenError(
            f"cannot start as primary of shard {config.shard}: its standby was in sync and may "
            f"have taken over. Try: start this server with `--standby-of HOST:PORT` of the "
            f"standby; if the standby is permanently lost: `touch "
            f"{config.failover_lock}/shard-{config.shard}/{LOSS_CONFIRMATION_FILE}`; if it belongs "
            f"to another job: give each job its own `--failover-lock`"
        )
    return primary_record


def _check_holder(config: ServerConfig, lease: LeaseStore | None, address: str) -> None:
    """Check that no standby has taken over from a server that was restarted as primary."""
    found = lease.read() if lease is not None else None
    if found is None or found.holder == address:
        return
    with open_channel(Endpoint(found.holder)) as channel:
        try:
            answer = Stub(channel, DESCRIBE)(DescribeRequest(), timeout=ANSWER_TIMEOUT_SECONDS)
        except grpc.RpcError as failure:
            if failure.code() is grpc.StatusCode.UNAVAILABLE:
                return  # no server answers there
        else:
            if (answer.shard, answer.shards) != (
                config.shard,
                config.shards,
            ) or answer.term < found.term:
                return
    raise TakenError(
        f"cannot start as primary of shard {config.shard}: {found.holder} is primary in term "
        f"{found.term}. Try: start this server with `--standby-of {found.holder}`; if that server "
        f"belongs to another job: give each job its own `--failover-lock`",
        "DEPOSED",
    )
