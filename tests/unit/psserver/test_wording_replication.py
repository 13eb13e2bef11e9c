"""The texts of primaries and standbys: WHAT failed: WHY. Try: HOW.

Other tests assert reasons, exit codes and the names of flags. A changed text changes this file.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from prometheus_client import CollectorRegistry

from pscommon.core.errors import PSError, UnreachableError
from psproto.v1 import standby_pb2 as pb
from psserver.core.shard.primary_lease import PrimaryRecord
from psserver.core.shard.replication import ReplicationMachine
from psserver.durability.record_sink import RecordSource
from psserver.durability.state_records import StateRecord, StateRecordKind
from psserver.process.config import ServerConfig
from psserver.process.metrics import ServerMetrics
from psserver.replication.hello import Hello
from psserver.replication.lease_directory import LeaseDirectory, begin_primary, lease_of
from psserver.replication.primary import PrimaryReplicator
from psserver.replication.servicer import StandbyServicer
from psserver.replication.standby import Standby
from psserver.replication.standby_state import StandbyState
from tests.support.wording import check_form


def metrics() -> ServerMetrics:
    return ServerMetrics(CollectorRegistry(), shard=0)


def lease_in_a_file(folder: Path) -> None:
    (folder / "lock").write_text("")
    lease_of(ServerConfig(failover_lock=folder / "lock"))


def lease_without_holder(folder: Path) -> None:
    config = ServerConfig(failover_lock=folder)
    lease = LeaseDirectory(folder, 0)
    (folder / "shard-0" / "000000001.json").write_text('{"term": 1}')
    begin_primary(config, lease, "a:1")


def living_holder(folder: Path) -> None:
    config = ServerConfig(failover_lock=folder)
    lease = LeaseDirectory(folder, 0)
    lease.swap(None, PrimaryRecord(2, "b:1"))
    answer = Mock(shard=0, shards=1, term=2)
    stub = Mock(return_value=Mock(Describe=Mock(return_value=answer)))
    with patch("psserver.replication.lease_directory.ParameterServerServiceStub", stub):
        begin_primary(config, lease, "a:1")


def deposed(why: str) -> None:
    raise PSError(why)


def replicator(lease: Any = None) -> PrimaryReplicator:
    machine = ReplicationMachine(PrimaryRecord(1, "a:1"), lease, time.monotonic())
    made = PrimaryReplicator(machine, metrics(), deposed)  # type: ignore[arg-type]
    made.copy_state = lambda begin: begin(
        [StateRecord(RecordSource.LINE, StateRecordKind.LOADED, b"{}")]
    )
    return made


def request(name: str, term: int = 0) -> pb.ReplicateRequest:
    return pb.ReplicateRequest(instance=name, address=f"{name}:1", term=term)


def second_standby() -> None:
    made = replicator()
    made.attach(request("s"))
    made.attach(request("t"))


def handover() -> None:
    """Hand over to a standby, which then connects again."""
    made = replicator()
    link = made.attach(request("s"))
    made.handle_acknowledgement(link, made.last_position[1])
    made.step_down("s", 1.0)
    made.handle_disconnect(link)
    made.attach(request("s"))


def unfinished_handover() -> None:
    """Hand over to a standby that does not acknowledge the last record."""
    made = replicator()
    made.handle_acknowledgement(made.attach(request("s")), made.last_position[1])
    made.send(RecordSource.SHARD, 4, b"entry")
    made.step_down("s", 0.0)


def another_primary() -> None:
    lease = Mock(read=lambda: PrimaryRecord(2, "s:1"))
    made = replicator(lease)
    made._machine._depose()
    made._check()


def standby(**attributes: Any) -> Mock:
    """Return what the methods of a standby need."""
    return Mock(**{"primary": "a:1", "_promoted": None, "_why_suffix": ": refused"} | attributes)


def promoted_primary() -> None:
    context = Mock(abort_with_status=Mock(side_effect=lambda status: deposed(status.details)))
    StandbyServicer(replicator(), None).Promote(pb.PromoteRequest(), context)


def silent_primary() -> None:
    made = standby(_retried_reasons=(), _failover=Mock(has_state=False))
    made.ended.is_set.return_value = False
    made.config.join_timeout = 0.5
    made._failover.silence_seconds.return_value = 1.0
    Standby._handle_end(made, UnreachableError("a:1 does not answer"))
    raise made.failure


def refused_promotion() -> None:
    made = standby(_promoting=Mock(__enter__=Mock(), __exit__=Mock(return_value=False)))
    made.ended.is_set.return_value = False
    made._failover.take_over.return_value = None
    Standby.promote(made, 0.0)


def stopping_standby() -> None:
    made = standby(_promoting=Mock(__enter__=Mock(), __exit__=Mock(return_value=False)))
    made.ended.is_set.return_value = True
    Standby.promote(made, 0.0)


def former_primary() -> None:
    made = standby()
    made._failover.begin_loading.return_value = False
    Standby._begin(made, Hello(1, "job", "a:1", (), {}, ""))


def incomplete_promotion() -> None:
    made = standby(_promoted=PrimaryRecord(2, "b:1"), _failover=Mock(has_state=False))
    made._promoting = Mock(__enter__=Mock(), __exit__=Mock(return_value=False))
    made._tick_forever = lambda: None
    Standby.run(made)


def other_settings() -> None:
    config = ServerConfig(min_workers=2)
    hello = Hello(1, "job", "a:1", (), config.rules().as_json(), "")
    hello.check_settings(ServerConfig(min_workers=1))


FAILURES: dict[str, Callable[[Path], object]] = {
    # primaries
    "failover lock": lease_in_a_file,
    "lease": lease_without_holder,
    "holder": living_holder,
    "deposed": lambda folder: another_primary(),
    "term": lambda folder: replicator().attach(request("s", term=2)),
    "second standby": lambda folder: second_standby(),
    "handover": lambda folder: handover(),
    "unfinished handover": lambda folder: unfinished_handover(),
    "standby behind": lambda folder: replicator().step_down("s", 0.0),
    "promoted primary": lambda folder: promoted_primary(),
    # standbys
    "settings": lambda folder: other_settings(),
    "former primary": lambda folder: former_primary(),
    "silent primary": lambda folder: silent_primary(),
    "diverged": lambda folder: StandbyState._compare(Mock(version=3, checksum=lambda: 1), 4, 2),
    "empty standby": lambda folder: Standby._ask_to_step_down(standby(_standby_state=None)),
    "refused promotion": lambda folder: refused_promotion(),
    "stopping standby": lambda folder: stopping_standby(),
    "incomplete promotion": lambda folder: incomplete_promotion(),
}
TEXTS: dict[str, str] = {
    "failover lock": (
        "--failover-lock DIR/lock cannot be used: [Errno 20] Not a directory: 'DIR/lock/shard-0'"
    ),
    "lease": ("--failover-lock DIR cannot be used: DIR/shard-0/000000001.json has no key 'holder'"),
    "holder": (
        "cannot start as primary of shard 0: b:1 is primary in term 2. Try: start this server "
        "with `--standby-of b:1`; if that server belongs to another job: give each job its own "
        "`--failover-lock`"
    ),
    "deposed": ("this server is not primary of its shard any more; the primary is s:1, in term 2"),
    "term": "this server's term is 1, but its standby knows term 2",
    "second standby": "this shard already has a standby at s:1",
    "handover": "this server is handing over to its standby",
    "unfinished handover": "the standby did not acknowledge the records in flight",
    "standby behind": (
        "this standby is behind (none). Try: wait until `ps-ctl status` shows it in sync; then "
        "promote"
    ),
    "promoted primary": "this server is primary of its shard",
    "settings": (
        "the settings of this standby differ from its primary's: min_workers (1, primary: 2)"
    ),
    "former primary": "a:1 is no longer primary: its term is only 1",
    "silent primary": "the primary at a:1 did not answer within 0.5 s: a:1 does not answer",
    "diverged": (
        "the weights at version 3 differ from the primary's at version 4: checksums 00000001 "
        "and 00000002"
    ),
    "empty standby": (
        "this standby has not loaded the state of a:1: refused. Try: wait until `ps-ctl "
        "status` shows it in sync"
    ),
    "refused promotion": (
        "cannot promote this standby: a:1 may have continued without it. Try: restart that "
        "server, or all servers from a snapshot"
    ),
    "stopping standby": "this standby is stopping",
    "incomplete promotion": (
        "cannot become primary: the last record of the former primary could not be applied"
    ),
}


def text_of(name: str, folder: Path) -> str:
    with pytest.raises(PSError) as caught:
        FAILURES[name](folder)
    return str(caught.value).replace(str(folder), "DIR")


@pytest.mark.parametrize("name", FAILURES)
def test_text(name: str, tmp_path: Path) -> None:
    assert text_of(name, tmp_path) == TEXTS[name]


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_has_at_most_one_remedy_and_is_short(name: str) -> None:
    check_form(TEXTS[name])
