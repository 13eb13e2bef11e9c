"""The settings of one server, checked once before anything is opened."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pscommon.core.errors import InvalidRequestError
from pscommon.core.limits import ALLREDUCE, check_allreduce, check_policy
from pscommon.security.settings import SecuritySettings, check_exposure, security_settings
from pscommon.settings.values import (
    FIRST_PORT,
    LAST_PORT,
    BadGradients,
    Durability,
    Lanes,
    LogFsync,
    OnWorkerLoss,
    ShardIndex,
    SnapshotEvery,
    WorkerBounds,
    host_and_port,
)
from pscommon.system.process_limits import raise_file_limit, usable_memory
from pscommon.system.small_files import why_no_file
from pscommon.system.thread_team import cores
from pscommon.telemetry.logs import Format
from psserver.core.job.policy import Policy, policy
from psserver.core.job.settings import GradientRules, JobRules, WorkerLossMode
from psserver.core.job.snapshot_schedule import SnapshotInterval
from psserver.core.job.worker_scaling import WorkerScaling

DROP_LOST_WORKERS = OnWorkerLoss()
NO_SECURITY = SecuritySettings()
MAX_CONCURRENT_CALLS = 1024
"""Concurrent gRPC calls of one server; more are refused with RESOURCE_EXHAUSTED. A call that waits
occupies a thread.
"""

RESERVED_CALLS_COUNT = 64
"""gRPC calls that are left for heartbeats, other servers and people."""

RESERVED_FILES_COUNT = 256
FILES_PER_WORKER_COUNT = 6
"""Two gRPC channels, a stream for exchanges, two for requests, and a reserve."""

ALL_INTERFACES = ("0.0.0.0", "[::]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The settings of one server, named like its flags.

    Raises:
        InvalidRequestError: The settings do not fit together (exit code 2).
    """

    shard: int = 0
    """This server's shard, 0 <= shard < shards. Shard 0 also coordinates."""
    shards: int = 1
    bind: str = ""
    """HOST:PORT to listen on; port 0 picks a free one. Empty becomes 127.0.0.1 and port 50051 +
    shard.
    """
    advertise: str | None = None
    """HOST:PORT that others connect to; None: the bound address."""
    join: str | None = None
    """HOST:PORT of shard 0, for all other shards; None: a worker that lists all servers sends it.

    Shard 0 ignores it, so that all servers can share one file.
    """
    join_timeout: float = 300.0
    """Seconds to wait for the other shards, and for --min-workers after the first worker."""
    policy: str = "sync"
    staleness: int | None = None
    """Steps that a worker may be ahead of the slowest one; required for ssp, unused otherwise."""
    max_staleness: int | None = None
    """Refuse gradients computed more than this number of versions ago; None: never."""
    min_workers: int = 1
    """Workers required before training starts."""
    scale_workers: WorkerBounds | None = None
    """Bounds of automatic scaling; None: off."""
    max_workers: int | None = None
    """Workers that this server serves at a time; None becomes what its files and threads allow."""
    lease: float = 5.0
    """Seconds without a heartbeat after which a worker is dropped."""
    progress_timeout: float | None = None
    """Seconds without a call of a worker's script after which it is dropped; None: never."""
    on_worker_loss: OnWorkerLoss = DROP_LOST_WORKERS
    """Whether a lost worker is dropped, awaited, or ends the job."""
    backup_workers: int = 0
    """sync: number of slowest workers that a round does not wait for."""
    global_batch: int | None = None
    """sync: samples of one update; None: one batch of each worker."""
    bad_gradients: BadGradients = "abort"
    """How gradients with NaN, Inf or a norm above max_norm are handled."""
    max_norm: float | None = None
    quarantine_after: int | None = None
    """Number of consecutive bad gradients after which a worker is removed; None: never."""
    job: str | None = None
    """Name of the job; None: shard 0 generates one."""
    optimizers: str | None = None
    """Module that registers the user's optimizers; None: there are none."""
    exit_when_done: bool = False
    """Stop once every worker has left and is done."""
    data_dir: Path | None = None
    """Directory for snapshots and logs, shared by all shards; None: nothing is stored."""
    snapshot_every: SnapshotEvery | None = None
    """None becomes 60 s if there is a data_dir."""
    snapshot_keep: int = 3
    durability: Durability = "snapshot"
    """log: each update is written to the log before it is acknowledged."""
    log_fsync: LogFsync = "everysec"
    standby_of: str | None = None
    """HOST:PORT of this shard's primary; this server is its standby. None: this server is
    primary.
    """
    failover_lock: Path | None = None
    """Directory with the primary lease of each shard; None: only an operator promotes a standby."""
    resume: Literal["auto", "never"] | int = "auto"
    """auto: the newest valid snapshot, if any; a number: exactly that version."""
    save: Path | None = None
    """File for the final weights (safetensors), written by shard 0 at its end; None: none."""
    tensorboard: Path | None = None
    """Directory for curves that TensorBoard shows, written by shard 0; None: none."""
    metrics_bind: str | None = None
    """HOST:PORT of /metrics, /livez and /readyz; None: off."""
    port_file: Path | None = None
    """File for the bound port."""
    lanes: Lanes = "auto"
    """grpc: neither shared memory nor streams; stream: no shared memory; shm: no push over the
    network (observers may pull), and streams only over the Unix socket.
    """
    stream_bind: str | None = None
    """HOST:PORT of the stream port; None: the port of `bind` plus 1000, or any free port."""
    advertise_stream: str | None = None
    """HOST:PORT that workers open streams to; None: the host of `advertise` and the bound port."""
    security: SecuritySettings = NO_SECURITY
    """TLS files and token file, and whether plain text may leave this machine."""
    in_flight: int = 0
    """Bytes of pushes and pulls held at a time; 0 becomes half of the memory."""
    threads: int | None = None
    """Threads for one update of a large model; None becomes the number of cores, at most 4
    (memory-bound).
    """
    log_level: str = "info"
    log_format: Format = "auto"

    def __post_init__(self) -> None:
        """Fill in the defaults that depend on other settings, then check the combination."""
        if not self.bind:
            if FIRST_PORT + self.shard > LAST_PORT:
                raise InvalidRequestError(
                    f"--shard {self.shard}/{self.shards} has no default port: the last port is "
                    f"{LAST_PORT}. Try: `--bind HOST:PORT`"
                )
            object.__setattr__(self, "bind", f"127.0.0.1:{FIRST_PORT + self.shard}")
        if self.shard == 0 and self.save is not None and (problem := why_no_file(self.save)):
            raise InvalidRequestError(f"--save {self.save}: {problem}")
        if self.data_dir and self.snapshot_every is None:
            object.__setattr__(self, "snapshot_every", SnapshotEvery(seconds=60.0))
        if not self.in_flight:
            object.__setattr__(self, "in_flight", usable_memory() // 2)
        if self.threads is None:
            object.__setattr__(self, "threads", min(4, cores()))
        files = raise_file_limit()  # also if the user has set the number of workers
        if self.max_workers is None:
            object.__setattr__(self, "max_workers", _capacity(self.lanes, files))
        if self.shard == 0:
            object.__setattr__(self, "join", None)
        self._check_numbers()
        self._check_combinations()

    def _check_numbers(self) -> None:
        if not 0 <= self.shard < self.shards:
            raise InvalidRequestError(
                f"--shard {self.shard}/{self.shards} is not valid: shards are counted from 0. "
                f"Try: I/N with I less than N"
            )
        least = {
            "min_workers": 1,
            "max_workers": 1,
            "backup_workers": 0,
            "global_batch": 1,
            "quarantine_after": 1,
            "snapshot_keep": 1,
            "threads": 1,
            "max_staleness": 0,
        }
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise InvalidRequestError(
                    f"--{name.replace('_', '-')} {value} is not valid. Try: at least {smallest}"
                )
        for name in ("lease", "join_timeout", "progress_timeout"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise InvalidRequestError(
                    f"--{name.replace('_', '-')} {getattr(self, name)} is not valid. "
                    f"Try: more than 0 seconds"
                )

    def _check_combinations(self) -> None:
        if self.policy == ALLREDUCE:
            tls, tokens = self.security.tls, self.security.token_file
            given = {each.name: getattr(self, each.name) for each in fields(self)}
            check_allreduce(tls_cert=tls.cert if tls else None, token_file=tokens, **given)
        else:
            check_policy(self.policy, self.staleness, self.backup_workers, self.global_batch)
        if host_and_port(self.bind)[0] in ALL_INTERFACES and not self.advertise:
            raise InvalidRequestError(
                f"--bind {self.bind} listens on all interfaces: other processes need one address. "
                f"Try: `--advertise HOST:PORT`"
            )
        for flag in ("bind", "stream_bind", "metrics_bind"):
            if (address := getattr(self, flag)) is not None:
                check_exposure(f"--{flag.replace('_', '-')}", address, self.security)
        if self.port_file is not None and not self.port_file.resolve().parent.is_dir():
            raise InvalidRequestError(
                f"--port-file {self.port_file} cannot be written: the folder "
                f"{self.port_file.parent} does not exist. Try: create it"
            )
        if not self.data_dir and self.durability == "log":
            raise InvalidRequestError(
                "--durability log needs a directory for the log. Try: `--data-dir DIR`"
            )
        if not self.data_dir and self.snapshot_every is not None:
            raise InvalidRequestError(
                f"--snapshot-every {self.snapshot_every} needs a directory for snapshots. "
                f"Try: `--data-dir DIR`"
            )
        if not self.data_dir and isinstance(self.resume, int):
            raise InvalidRequestError(
                f"--resume {self.resume} needs the directory of the snapshots. "
                f"Try: `--data-dir DIR`"
            )

    def make_policy(self, name: str, staleness: int | None, max_staleness: int | None) -> Policy:
        """Return this policy with the other settings of the job.

        Raises:
            InvalidRequestError: There is no such policy.
        """
        backup = self.backup_workers if name == "sync" or staleness == 0 else 0
        return policy(name, staleness, max_staleness, backup)

    def make_scaling(self) -> WorkerScaling | None:
        """Return the policy of --scale-workers; None without it."""
        bounds = self.scale_workers
        return WorkerScaling(bounds.smallest, bounds.largest) if bounds is not None else None

    def rules(self) -> JobRules:
        """Return the coordinator's settings."""
        every = self.snapshot_every
        return JobRules(
            self.make_policy(self.policy, self.staleness, self.max_staleness),
            self.min_workers,
            self.lease,
            SnapshotInterval(every.seconds, every.steps) if every else SnapshotInterval(),
            WorkerLossMode(self.on_worker_loss.mode, self.on_worker_loss.seconds),
            self.bad_gradients,
            self.max_norm,
            self.quarantine_after,
            self.global_batch,
            self.progress_timeout,
        )

    @property
    def gradient_rules(self) -> GradientRules:
        """Which properties of gradients shards check; shard 0 sends it to the others."""
        return GradientRules(self.bad_gradients == "clip", self.max_norm is not None)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "ServerConfig":
        """Create it from the parsed command line, where shard and shards are one value."""
        shard_index: ShardIndex = settings["shard"]
        chosen = {
            field.name: settings[field.name] for field in fields(cls) if field.name in settings
        }
        chosen |= {
            "shard": shard_index.index,
            "shards": shard_index.count,
            "bind": settings["bind"] or "",
        }
        chosen |= {"in_flight": settings["in_flight"] or 0}
        chosen |= {"security": security_settings(settings)}
        return cls(**chosen)


def _capacity(lanes: Lanes, files: int) -> int:
    """Return the number of workers for which there are enough open files, and gRPC threads if
    exchanges use them.

    files: Limit of open files.
    """
    workers = (files - RESERVED_FILES_COUNT) // FILES_PER_WORKER_COUNT
    return max(
        1, min(workers, MAX_CONCURRENT_CALLS - RESERVED_CALLS_COUNT) if lanes == "grpc" else workers
    )
