"""Resharding on shard 0: started by a command, carried out by all shards, and reported to
callers.
"""

import json
import threading
import time
from collections.abc import Mapping
from typing import Any

from pscommon.core.errors import (
    InvalidRequestError,
    SnapshotError,
    UnreachableError,
    WaitTimeoutError,
)
from pscommon.snapshot import Manifest
from pscommon.telemetry.logs import get_logger
from psproto.v1 import coordinator_pb2 as pb
from psserver.coordinator.executor import CommandExecutor
from psserver.core.commands.recorder import Recorder
from psserver.core.coordinator.admission import check_reshard
from psserver.core.servers.shard_directory import ShardDirectory
from psserver.core.servers.shard_protocol import start_reshard
from psserver.durability.snapshots import SnapshotManager
from psserver.peers.resharding import build_partition
from psserver.process.config import ServerConfig
from psserver.process.identity import ServerIdentity
from psserver.process.job_files import ShardCountFile
from psserver.shard.engine import ShardEngine

MAX_LISTED_COMMANDS = 8
"""Number of missing servers whose start commands an error message lists."""

log = get_logger(__name__)


class ReshardRequests:
    """The coordinator's part of a reshard. The rules are in core/job/reshard_phase.py."""

    def __init__(
        self,
        executor: CommandExecutor,
        directory: ShardDirectory[Manifest],
        shard_count: ShardCountFile,
        engine: ShardEngine,
        snapshots: SnapshotManager,
        identity: ServerIdentity,
        config: ServerConfig,
    ) -> None:
        self._executor, self._directory = executor, directory
        self._engine, self._snapshots = engine, snapshots
        self._identity, self._config, self._shard_count = identity, config, shard_count
        self._received_nbytes: dict[int, int] = {}  # bytes that a shard received from others
        self._problems: dict[int, str] = {}  # why a shard's last attempt failed
        self._reshard_thread: threading.Thread | None = None

    def reshard(self, shards: int, seconds: float) -> tuple[float, int]:
        """Reshard the model to another number of shards and wait for the end.

        Returns the seconds without a counted push, and the bytes sent between servers. Raises
        InvalidRequestError if the reshard is impossible or servers are not started yet,
        WaitTimeoutError if it did not start or end within `seconds`.
        """
        self._check(shards)
        deadline = time.monotonic() + seconds
        began = self._executor.wait(
            lambda recorder, now: self._begin(recorder, now, shards), seconds
        )
        if began is None:
            raise WaitTimeoutError(
                f"the reshard has not begun after {seconds:.0f} s: waiting for "
                f"{self._directory.missing or 'the end of a snapshot'}"
            )
        log.info("reshard_started", shards=shards)
        self.advance()
        # this process's own shard has reached the entry: new shards can now receive its state
        self._executor.wake()
        left = max(0.0, deadline - time.monotonic())
        ended = self._executor.wait(
            lambda recorder, now: now if recorder.coordinator.job.reshard is None else None, left
        )
        self.advance()
        if ended is None:
            raise WaitTimeoutError(
                f"the reshard is not done after {seconds:.0f} s, and continues: waiting for "
                f"{self.waiting_for}"
            )
        nbytes = sum(self._received_nbytes.values())
        log.info("reshard_finished", shards=shards, seconds=round(ended - began, 3), nbytes=nbytes)
        return ended - began, nbytes

    def _check(self, shards: int) -> None:
        with self._executor.changed:
            now, coordinator = self._directory.shards, self._executor.coordinator
            if shards == now:
                raise InvalidRequestError(
                    f"--servers {shards} changes nothing: the job has this number already"
                )
            if coordinator.job.reshard is not None:
                raise InvalidRequestError(
                    f"a reshard to {now} servers is in progress and waits for {self.waiting_for}"
                )
            if not coordinator.job.begun:
                raise UnreachableError(
                    "there is nothing to reshard: no weights have arrived yet", "NOT_READY"
                )
            candidates, address = self._directory.candidates, self._identity.address
            if missing := [s for s in range(now, shards) if (s, shards) not in candidates]:
                shown = missing[:MAX_LISTED_COMMANDS]
                lines = "".join(
                    f"\n  ps-server --shard {s}/{shards} --join {address}" for s in shown
                )
                if len(missing) > len(shown):
                    lines += f"\n  and {len(missing) - len(shown)} more"
                raise InvalidRequestError(
                    f"{len(missing)} of {shards} servers have not started. Try: start them:{lines}"
                )
            check_reshard(coordinator, shards, self._config.in_flight)

    def _begin(self, recorder: Recorder, now: float, shards: int) -> float | None:
        """Start the reshard if possible. Called by the executor."""
        writes_snapshot = self._snapshots.enabled
        if not start_reshard(
            recorder, self._directory, shards, writes_snapshot, self._store_count, now
        ):
            return None
        self._received_nbytes.clear()
        self.learn()
        return now

    def _store_count(self, shards: int) -> None:
        try:
            self._shard_count.change(shards)
        except OSError as error:
            raise SnapshotError(f"cannot store the number of servers: {error}") from error

    @property
    def waiting_for(self) -> str:
        """The shards that a reshard waits for, in words; empty without a reshard."""
        reshard = self._executor.coordinator.job.reshard
        if reshard is None:
            return ""
        late = [shard for shard in range(reshard.shards) if shard not in reshard.loaded_shards]
        if not late:
            return "the snapshot that ends the reshard"
        return f"{', '.join(f'shard {shard}' for shard in late)} to build its new partition"

    def learn(self) -> None:
        """Update the addresses that this server gives to others."""
        self._identity.learn(
            self._identity.job, self._directory.addresses, self._shard_count.changes
        )

    def advance(self) -> None:
        """Advance the reshard: build this shard's new part, and release servers that are no
        longer needed.
        """
        with self._executor.changed:
            coordinator = self._executor.coordinator
            reshard, log_id = coordinator.job.reshard, coordinator.job.log_id
            self.dismiss()
            if reshard is None:
                self._engine.live.discard_frozen()
            if (
                reshard is None
                or not self._engine.live.is_resharding
                or (self._reshard_thread is not None and self._reshard_thread.is_alive())
            ):
                return
            self._reshard_thread = threading.Thread(
                target=self._build_own_part,
                args=(log_id, reshard.index),
                name="reshard",
                daemon=True,
            )
            self._reshard_thread.start()

    def dismiss(self) -> None:
        """Release the servers that the job no longer needs after a reshard.

        The caller holds the executor's lock.
        """
        if self._directory.release_leavers(self._executor.coordinator):
            self._executor.wake()

    def _build_own_part(self, log_id: int, index: int) -> None:
        nbytes, problem = build_partition(
            self._engine, self._sources(), self._identity.job, log_id, index
        )
        self.partition_built(0, nbytes, problem)

    def _sources(self) -> list[str]:
        if (reshard := self._executor.coordinator.job.reshard) is None:
            return []
        return [server.address for server in list(self._directory)[: reshard.before]]

    def partition_built(self, shard: int, nbytes: int, problem: str) -> None:
        """Record that a shard has built its new part, or why it could not yet."""
        if problem and self._problems.get(shard) != problem:
            log.info("partition_delayed", peer_shard=shard, problem=problem)
        self._problems[shard] = problem
        if not problem:
            self._received_nbytes[shard] = self._received_nbytes.get(shard, 0) + nbytes

    def state(self) -> dict[str, Any] | None:
        """Return the state for a shard that is new in a reshard; None before this process's own
        shard has it.
        """
        reshard = self._executor.coordinator.job.reshard
        return self._engine.live.state_after(reshard.index) if reshard is not None else None

    def describe(self, adopts: Mapping[str, Any] | None) -> pb.Move | None:
        """Return the description of the reshard that shards receive; None without a reshard.

        adopts: The state for a shard that is new in this reshard.
        """
        with self._executor.changed:
            reshard = self._executor.coordinator.job.reshard
            if reshard is None:
                return None
            state = json.dumps(adopts) if adopts is not None else ""
            return pb.Move(index=reshard.index, sources=self._sources(), state_json=state)
