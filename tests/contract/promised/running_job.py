"""A small job whose status, metrics and data directory contain everything."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import StreamSpec
from pscommon.wal.format import RecordReader
from psserver.coordinator.status import describe
from psserver.process.job_files import ShardCountFile
from psserver.server import Server
from tests.contract.promised import found
from tests.support.cluster import Cluster
from tests.support.standbys import RunningStandby
from tests.support.workers import ONES, counter, until

STATUS_MAPS = {"metrics": "NAME", "events[].fields": "NAME"}


class JobNames(NamedTuple):
    """Names that a running job uses."""

    status: set[str]
    settings: set[str]
    files: set[str]
    metrics: set[str]
    job_segment: set[str]
    shard_segment: set[str]


def names_of_a_running_job(data_dir: Path, lock: Path) -> JobNames:
    """Run two shards, a standby, a worker with a loop and a stream, a snapshot, and a candidate."""
    cluster = Cluster(
        2, data_dir=data_dir, durability="log", failover_lock=lock, metrics_bind="127.0.0.1:0"
    )
    try:
        first = cluster.servers[0]
        with RunningStandby(
            first, data_dir=data_dir.with_name("standby"), metrics_bind=None
        ) as standby:
            standby.in_sync()
            cluster.add(2, 3, data_dir=data_dir, failover_lock=lock)
            return _trained(first, data_dir, lock)
    finally:
        cluster.close()


def _trained(first: Server, data_dir: Path, lock: Path) -> JobNames:
    assert first.service is not None
    with counter(first.address) as client:
        client.data.next_batches(LoopSpec(0, size=8, batch_size=1))
        client.data.next_batches(StreamSpec(1, sources=1, batch_size=1))
        client.report(loss=0.5)
        assert client.push_pull(ONES).status == "applied"
        begun = _segment_keys(data_dir / "log-job", found.STATE_MAPS)
        first.service.want_workers(2, "a test")
        first.service.snapshot_scheduler.save(20.0)
        until(lambda: first.service and describe(first.service)["candidates"], "a candidate")
        until(lambda: _families_without_series(first) == set(), "a sample of each metric")
        status = json.loads(json.dumps(describe(first.service)))
        metrics = found.metrics(first.metrics.registry)
    ShardCountFile(2, data_dir).change(3)  # as after a reshard
    return JobNames(
        found.key_paths(status, STATUS_MAPS),
        {row["key"] for row in status["settings"]},
        found.file_names(data_dir) | {f"FAILOVER-LOCK/{name}" for name in found.file_names(lock)},
        metrics,
        begun | _segment_keys(data_dir / "log-job", found.STATE_MAPS),
        _segment_keys(data_dir / "log-shard-0", {}),
    )


def _segment_keys(folder: Path, maps: Mapping[str, str]) -> set[str]:
    """Return the keys of the state at the start of the newest segment."""
    newest = max(folder.glob("*.log"))
    return found.key_paths(json.loads(next(RecordReader(newest)).header), maps)


def _families_without_series(server: Server) -> set[str]:
    families = [
        family for family in server.metrics.registry.collect() if family.name.startswith("ps_")
    ]
    return {family.name for family in families if not family.samples}
