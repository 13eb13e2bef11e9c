"""A lock in the file system: who is primary of a shard, for servers on one host or with a common
folder.
"""

import contextlib
import json
import os
import uuid
from dataclasses import replace
from pathlib import Path

import grpc

from pscommon.core.errors import TakenError
from pscommon.wire.channel import open_channel
from psproto.v1.parameter_server_pb2 import DescribeRequest
from psproto.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psserver.core.shard.failover import acquire_primary_record
from psserver.core.shard.primary_lease import LeaseStore, PrimaryRecord
from psserver.process.config import ServerConfig

GONE = "standby-is-gone"
"""A file with which an operator says that the standby which may take over will not. The term
stays, and grows: a server that began again with the first one would be refused by all who know
of later ones."""

ANSWERS = 3.0
"""Seconds that the holder of a tenure gets to say that it still is primary; one that is stopped
says nothing.
"""


class LeaseDirectory:
    """One file for each tenure, numbered; the last one counts (core/shard/primary_lease.py: LeaseStore).

    A swap links a complete file to the next number, which fails where somebody else did; so
    nobody ever waits for a lock whose holder was stopped. The folder is made; all may raise
    OSError.
    """

    def __init__(self, folder: Path, shard: int) -> None:
        self._folder = folder / f"shard-{shard}"
        self._folder.mkdir(parents=True, exist_ok=True)

    def read(self) -> PrimaryRecord | None:
        while number := self._newest():
            with contextlib.suppress(FileNotFoundError):  # a newer one is there by now
                return self._read(number)
        return None

    def swap(self, old: PrimaryRecord | None, new: PrimaryRecord) -> bool:
        number = self._newest()
        try:
            found = self._read(number) if number else None
        except FileNotFoundError:
            return False  # a newer one is there by now
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
        # one who thought for long may have made a number again that was removed since: the last one
        # counts
        won = self._newest() == number + 1
        (self._path(number) if won else self._path(number + 1)).unlink(missing_ok=True)
        return won

    def let_go(self) -> None:
        """Nobody is in sync, if an operator says so."""
        said, found = self._folder / GONE, self.read()
        if said.exists():
            if found is not None:
                self.swap(found, replace(found, in_sync=""))
            said.unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:09d}.json"

    def _newest(self) -> int:
        """0: there is none."""
        return max((int(path.stem) for path in self._folder.glob("*.json")), default=0)

    def _read(self, number: int) -> PrimaryRecord:
        raw = json.loads((path := self._path(number)).read_text())
        try:
            return PrimaryRecord(raw["term"], raw["holder"], raw.get("in_sync", ""))
        except KeyError as missing:
            raise ValueError(f"{path} has no {missing}") from missing


def _write(path: Path, text: str) -> None:
    """On the disk when this returns: after a power cut, a tenure that nobody can read would keep
    all servers away.
    """
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def lease_of(config: ServerConfig) -> LeaseDirectory | None:
    """The lock that a server goes by. TakenError where it cannot be used."""
    if config.failover_lock is None:
        return None
    try:
        return LeaseDirectory(config.failover_lock, config.shard)
    except OSError as error:
        raise TakenError(
            f"--failover-lock {config.failover_lock} cannot be used: {error}"
        ) from error


def begun(config: ServerConfig, lease: LeaseDirectory | None, address: str) -> PrimaryRecord:
    """What a server that was started as primary, here, is primary by. TakenError where it must
    not be.
    """
    try:
        _check_holder(config, lease, address)
        if lease is not None:
            lease.let_go()
        tenure = acquire_primary_record(lease, address)
    except (OSError, ValueError, TypeError) as error:
        raise TakenError(
            f"--failover-lock {config.failover_lock} cannot be used: {error}"
        ) from error
    if tenure is None:
        raise TakenError(
            f"shard {config.shard} has a standby that is in sync and may be primary by now: start "
            f"this server with "
            f"--standby-of and its address; if it is gone for good, say so with touch "
            f"{config.failover_lock}/shard-{config.shard}/{GONE}; if it is of another job, give "
            f"each job a "
            "--failover-lock of its own"
        )
    return tenure


def _check_holder(config: ServerConfig, lease: LeaseStore | None, address: str) -> None:
    """One that was started again, by whoever watches it, is not to take the place of the standby
    that took over.
    """
    found = lease.read() if lease is not None else None
    if found is None or found.holder == address:
        return
    with open_channel(found.holder) as channel:
        try:
            stub = ParameterServerServiceStub(channel)
            answer = stub.Describe(DescribeRequest(), timeout=ANSWERS)
        except grpc.RpcError as failure:
            if failure.code() is grpc.StatusCode.UNAVAILABLE:
                return  # nobody is there
        else:
            if (answer.shard, answer.shards) != (
                config.shard,
                config.shards,
            ) or answer.term < found.term:
                return
    raise TakenError(
        f"{found.holder} is primary of shard {config.shard}, in term {found.term}: start this "
        f"server with "
        f"--standby-of {found.holder}; if that is of another job, give each job a --failover-lock "
        f"of its own",
        "DEPOSED",
    )
