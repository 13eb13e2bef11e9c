"""Which job the data of a server belong to, over restarts."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pscommon.core.errors import MismatchError, SnapshotError, UnreachableError
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import standby_pb2 as pb
from psserver.peers.link_messages import ShardMessages
from psserver.process.config import ServerConfig
from psserver.process.identity import ServerIdentity
from psserver.process.job_files import JobIdFile
from psserver.replication.handlers import check_standby
from psserver.replication.standby import Standby
from psserver.server import Server
from tests.support.events import events


def test_the_job_name_is_stored_in_the_data_directory(tmp_path: Path) -> None:
    assert JobIdFile(tmp_path).stored_job == ""
    JobIdFile(tmp_path).store("größe")
    assert JobIdFile(tmp_path).stored_job == "größe"
    JobIdFile(tmp_path).store("otter")
    assert JobIdFile(tmp_path).stored_job == "otter"


def test_without_a_data_directory_the_job_name_ends_with_the_process() -> None:
    name = JobIdFile(None)
    name.store("otter")
    assert (name.stored_job, JobIdFile(None).stored_job) == ("otter", "")


def test_an_unreadable_job_name_is_reported(tmp_path: Path) -> None:
    (tmp_path / "job").write_bytes(b"\xff\xfe")
    with pytest.raises(SnapshotError, match="cannot tell whose job's data these are"):
        JobIdFile(tmp_path)


def test_a_failed_write_of_the_job_name_does_not_stop_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = JobIdFile(tmp_path / "missing")
    name.store("otter")
    assert name.stored_job == "otter"
    assert "job_name_not_stored" in events(caplog)


def server(data_dir: Path | None, **settings: Any) -> str:
    """Return the job of a shard 0 that starts here and dies at once."""
    made = Server(
        ServerConfig(
            **{"shard": 0, "shards": 1, "bind": "127.0.0.1:0", "data_dir": data_dir, **settings}
        )
    )
    made.start()
    try:
        return made.identity.job
    finally:
        made.close()


def test_shard_0_reuses_its_generated_job_name_without_a_snapshot(tmp_path: Path) -> None:
    name = server(tmp_path)

    assert server(tmp_path) == name
    assert server(None) != name
    assert server(tmp_path, job="otter") == "otter"
    assert server(tmp_path) == "otter"


def test_shard_0_refuses_the_data_of_another_job(tmp_path: Path) -> None:
    """Unless `--resume never` starts a new job."""
    server(tmp_path, job="otter")

    with pytest.raises(MismatchError, match="belongs to job otter, not stoat") as error:
        server(tmp_path, job="stoat")
    assert error.value.reason == "JOB_MISMATCH"
    assert server(tmp_path) == "otter"

    assert server(tmp_path, job="stoat", resume="never") == "stoat"


def requested_job(identity: ServerIdentity) -> str:
    """Return the job that a shard names in its request to shard 0."""
    line = cast(Any, SimpleNamespace(term=1, address="", state="none"))
    return ShardMessages(identity, cast(Any, None), line)._identify(co.LinkShardRequest()).job


def test_a_shard_is_bound_to_a_job_by_its_flags_its_data_or_its_log(
    tmp_path: Path,
) -> None:
    name = JobIdFile(tmp_path)
    identity = ServerIdentity(1, 2, "here:1", name=name)
    assert requested_job(identity) == ""

    identity.learn("otter", ["there:1", "here:1"], 0)

    assert requested_job(identity) == "otter"
    again = ServerIdentity(1, 2, "here:1", bound=JobIdFile(tmp_path).stored_job)
    # the job is unknown until shard 0 confirms it
    assert (requested_job(again), again.job) == ("otter", "")


def test_a_shard_with_its_own_job_name_sends_it_to_shard_0(tmp_path: Path) -> None:
    JobIdFile(tmp_path).store("otter")
    for job, bound in ((None, "otter"), ("stoat", "stoat")):
        made = Server(
            ServerConfig(shard=1, shards=2, bind="127.0.0.1:0", data_dir=tmp_path, job=job)
        )
        made.start()
        assert (made.identity.only_job, made.identity.job) == (bound, "")
        made.close()


def test_a_standby_is_bound_to_a_job(tmp_path: Path) -> None:
    JobIdFile(tmp_path).store("otter")
    config = {"shard": 0, "shards": 1, "bind": "127.0.0.1:0", "standby_of": "there:1"}
    for settings, bound in (
        ({}, ""),
        ({"data_dir": tmp_path}, "otter"),
        ({"job": "stoat"}, "stoat"),
    ):
        standby = Standby(ServerConfig(**{**config, **settings}), None)
        assert next(standby._requests()).job == bound


def test_a_primary_refuses_the_standby_of_another_job() -> None:
    check = partial(check_standby, ServerIdentity(0, 1, "here:1", job="otter"))
    check(pb.ReplicateRequest(shard=0, shards=1))
    check(pb.ReplicateRequest(shard=0, shards=1, job="otter"))
    with pytest.raises(MismatchError, match="stoat") as caught:
        check(pb.ReplicateRequest(shard=0, shards=1, job="stoat"))
    assert caught.value.reason == "JOB_MISMATCH"


def test_a_primary_without_a_job_asks_a_bound_standby_to_retry() -> None:
    check = partial(check_standby, ServerIdentity(1, 2, "here:1"))
    check(pb.ReplicateRequest(shard=1, shards=2))
    with pytest.raises(UnreachableError, match="not connected to the coordinator"):
        check(pb.ReplicateRequest(shard=1, shards=2, job="otter"))


def test_a_complete_standby_tolerates_a_primary_of_another_job_at_its_address() -> None:
    config = ServerConfig(shard=0, shards=1, bind="127.0.0.1:0", standby_of="there:1")
    for loaded in (True, False):
        standby = Standby(config, None)
        standby._failover.has_state = loaded
        standby._handle_end(MismatchError("this server's job is stoat, not otter", "JOB_MISMATCH"))
        assert (standby.failure is None) is loaded
