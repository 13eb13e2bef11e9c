"""The answer to GetStatus: everything about the job in one JSON object. Its keys are promised."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import StreamSpec
from pscommon.core.partition import PartitionPlan
from pscommon.snapshot import Manifest
from pscommon.telemetry.worker_rows import slowest_first
from psserver.coordinator.service import CoordinatorService
from psserver.core.commands.recorder import HUNG
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.servers.shard_directory import ShardDirectory
from psserver.core.workers.members import Member, WorkerState
from psserver.monitoring.live_page import MAX_WORKERS_COUNT, curves
from psserver.monitoring.training_curves import optimizer_rows
from psserver.monitoring.worker_monitor import find_conditions
from psserver.process.config import ServerConfig


def describe(service: CoordinatorService) -> dict[str, Any]:
    """Return the status."""
    listing, groups = list(service.snapshots.listing()), service.groups()
    with service.executor.changed:
        return _describe(service, listing, groups)


def describe_page(service: CoordinatorService) -> dict[str, Any]:
    """Return the status for the live page: the slowest workers, and curves."""
    listing, groups = list(service.snapshots.listing()), service.groups()
    with service.executor.changed:
        status = _describe(service, listing, groups)
        reported = service.executor.coordinator.reported
        rows = {
            name: reported.history.series(rank, name) for name, (rank, _) in reported.latest.items()
        }
        speeds = service.progress.speeds()
    shown = slowest_first(status["workers"])[:MAX_WORKERS_COUNT]
    omitted = len(status["workers"]) - len(shown)
    return {
        **status,
        "workers": shown,
        "workers_omitted": omitted,
        "series": curves(rows, speeds),
    }


def _describe(
    service: CoordinatorService,
    listing: list[dict[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the status with these snapshots on disk, and hyper-parameters of the model's groups.

    The caller holds the executor's lock.
    """
    coordinator, snapshots, now = service.executor.coordinator, service.snapshots, time.monotonic()
    policy = coordinator.job.policy
    return {
        "job": service.job,
        "training": coordinator.job.trainings.current,
        "trainings_finished": list(coordinator.job.trainings.finished),
        "policy": policy.name,
        "staleness": policy.bound if policy.name == "ssp" else None,
        "max_staleness": policy.max_staleness,
        "state": state(service, coordinator),
        "version": coordinator.job.version,
        "steps": coordinator.job.counts["applied"],
        "samples": coordinator.job.samples,
        "resumed": snapshots.resumed,
        "seconds": round(now - service.began_at, 3),
        "waiting_for": service.waiting_for,
        "min_workers": coordinator.job.min_workers,
        "workers_wanted": coordinator.job.workers_wanted,
        "backup_workers": policy.backup,
        **settings(service.config),
        "settings": in_force(service, coordinator),
        "servers": servers(service.directory),
        "candidates": [  # they wait for ps-ctl reshard
            {"shard": shard, "shards": shards, "address": server.address}
            for (shard, shards), server in sorted(service.directory.candidates.items())
        ],
        "moving_to": service.directory.shards if coordinator.job.reshard is not None else None,
        "workers": workers(coordinator, now),
        "goodput": goodput(service),
        "progress": service.progress.describe(coordinator, now),
        "data": data(coordinator),
        "snapshots": listing,
        "snapshot_age_seconds": round(max(0.0, time.time() - snapshots.newest_time), 3)
        if snapshots.newest_time
        else None,
        "snapshot_problem": snapshots.problem,
        "pushes": coordinator.job.counts
        | {"duplicate": sum(int(s.stats.get("duplicates", 0)) for s in service.directory)},
        "metrics": {
            name: value for name, (_, value) in sorted(coordinator.reported.latest.items())
        },
        "model": model(coordinator),
        "optimizers": [row._asdict() for row in optimizer_rows(coordinator, groups)],
        "finished": coordinator.membership.departed.done_count,
        "page": service.page,
        "events": service.events.newest(),
    }


def goodput(service: CoordinatorService) -> dict[str, float | None]:
    """Return which part of the computed samples counted, and of the time was not lost."""
    shares = service.engine.traffic.goodput.shares()
    return {name: share if share is None else round(share, 4) for name, share in shares.items()}


def settings(config: ServerConfig) -> dict[str, Any]:
    """Return the settings for failures."""
    return {
        "on_worker_loss": str(config.on_worker_loss),
        "scale_workers": str(config.scale_workers) if config.scale_workers else None,
        "progress_timeout": config.progress_timeout,
        "global_batch": config.global_batch,
        "bad_gradients": config.bad_gradients,
        "max_norm": config.max_norm,
        "quarantine_after": config.quarantine_after,
        "durability": config.durability,
        "log_fsync": config.log_fsync,
    }


PER_SERVER_SETTINGS = (
    "shard",
    "shards",
    "bind",
    "advertise",
    "join",
    "port_file",
    "metrics_bind",
    "standby_of",
    "security",
)
"""Settings of one process, which differ from server to server."""


def in_force(service: CoordinatorService, coordinator: CoordinatorMachine) -> list[dict[str, Any]]:
    """Return the job's settings for `ps-ctl config`: shard 0's flags and the policy that a
    command set.
    """
    name, staleness, max_staleness, _ = coordinator.job.policy_settings()
    chosen = {"policy": name, "staleness": staleness, "max_staleness": max_staleness}
    config = service.config
    given = {field.name: _plain(getattr(config, field.name)) for field in fields(config)}
    known = {"job": service.job, "shards": coordinator.job.shards}
    shared = {key: value for key, value in given.items() if key not in PER_SERVER_SETTINGS}
    rows = {**shared, **known, **chosen}
    return [
        {
            "key": key,
            "value": value,
            "source": "policy set" if key in chosen and value != given[key] else "shard 0",
        }
        for key, value in rows.items()
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.resolve())
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def state(service: CoordinatorService, coordinator: CoordinatorMachine) -> str:
    if service.stop_reason is not None:
        return "stopping"
    if not all(server.connected for server in service.directory):
        return "waiting for servers"
    if not coordinator.job.begun:
        return "waiting for a model"
    if coordinator.job.reshard is not None:
        return "moving"
    return "running" if coordinator.job.started else "waiting for workers"


def servers(directory: ShardDirectory[Manifest]) -> list[dict[str, Any]]:
    return [
        {
            "shard": s.shard,
            "address": s.address,
            "connected": s.connected,
            "term": s.term,
            **s.stats,
        }
        for s in directory
    ]


def workers(coordinator: CoordinatorMachine, now: float) -> list[dict[str, Any]]:
    found = find_conditions(coordinator, now)
    return [
        {
            "worker": m.worker,
            **_worker_process(m),
            "state": str(m.state),
            "clock": m.clock,
            "steps": m.steps,
            "staleness": m.staleness,
            "step_seconds": m.heartbeat.step_seconds,
            "samples_per_second": m.heartbeat.samples_per_second,
            "phase": m.heartbeat.phase,
            "phase_seconds": {
                phase: round(seconds, 3) for phase, seconds in m.heartbeat.phase_seconds.items()
            },
            "silent_seconds": round(now - m.last_contact_at, 3) if m.is_current else None,
            "reason": m.reason,
            "health": str(found[m.worker].health if m.is_current else m.state),
            "own_seconds": m.step_timer.median_seconds,
            "no_call_seconds": round(m.heartbeat.no_call_seconds, 3) if m.is_current else None,
            "hung": m.state is WorkerState.LOST and m.reason.startswith(HUNG),
            "draining": m.draining,
        }
        for m in coordinator.membership
    ]


def _worker_process(member: Member) -> dict[str, Any]:
    """Describe a worker's process; after a restart only numbers of earlier workers are known."""
    known = member.state is not WorkerState.PAST
    names = ("rank", "host", "pid", "device")
    return {name: getattr(member, name) if known else None for name in names}


def data(coordinator: CoordinatorMachine) -> list[dict[str, Any]]:
    return [
        {
            "loop": loop.spec.loop,
            "loader": loop.name.loader if loop.name is not None else None,
            "pass": loop.name.number if loop.name is not None else None,
            "batch_size": loop.spec.batch_size,
            "epochs": loop.spec.epochs,
            "committed": loop.committed,
            "leased": len(loop.leases),
            "dropped": loop.dropped,
            "duplicates": loop.duplicates,
            "ended": loop.ended,
            **_data_size(loop.spec, loop.committed),
        }
        for loop in coordinator.ledger.loops.values()
    ]


def _data_size(spec: LoopSpec | StreamSpec, committed: int) -> dict[str, Any]:
    """Return the size of the data; unknown for a stream."""
    if isinstance(spec, StreamSpec):
        return {"sources": spec.sources}
    epoch = committed // max(1, spec.batches_in_epoch)
    return {"size": spec.size, "total": spec.total, "epoch": epoch}


def model(coordinator: CoordinatorMachine) -> dict[str, Any] | None:
    spec = coordinator.job.model
    if spec is None:
        return None
    return {
        "tensors": len(spec.tensors),
        "parameters": sum(t.size for t in spec.tensors),
        "bytes": sum(t.nbytes for t in spec.tensors),
        "plan_digest": PartitionPlan(spec, coordinator.job.shards).digest,
        "optimizer": ", ".join(
            f"{name}: {settings.name}" if name else settings.name
            for name, settings in spec.optimizers.items()
        ),
    }
