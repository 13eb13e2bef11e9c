"""The texts of the coordinator's errors: WHAT failed: WHY. Try: HOW.

Other tests assert reasons, exit codes and the names of flags. A changed text changes this file.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from unittest.mock import Mock, PropertyMock

import pytest

from pscommon.core.errors import PSError, out_of_the_job
from psserver.coordinator import final_state
from psserver.coordinator.service import CoordinatorService
from psserver.core.commands.request_checks import check_shards
from psserver.core.commands.waiting import waiting_for
from psserver.core.job.reshard_phase import ReshardPhase
from psserver.core.job.settings import WorkerLossMode
from psworker.simulation import simulated
from tests.support.coordinator_job import Job
from tests.support.wording import check_form

DETAIL_CHARACTERS = {"many servers to start": 250}


def service() -> CoordinatorService:
    """Return the coordinator service of a job without a model."""
    return simulated(1, 1, "async", None).service


def begun() -> CoordinatorService:
    """Return a coordinator service whose job has weights."""
    made = service()
    made.executor.coordinator.job.begun = True
    return made


def stopping() -> CoordinatorService:
    made = service()
    made.stop_reason = "SIGTERM"
    return made


def fail(error: PSError | None) -> None:
    assert error is not None
    raise error


def failure_of(job: Job) -> PSError | None:
    return job.coordinator.job.failure


def lost_worker() -> None:
    job = Job()
    rules = job.coordinator.job.rules
    job.coordinator.job.rules = replace(rules, on_loss=WorkerLossMode("abort"))
    job.coordinator.departures.lose(1, "its lease ended", 0.0)
    fail(failure_of(job))


def bad_gradient() -> None:
    job = Job()
    job.push(1, 1, problem="NON_FINITE: tensor w")
    fail(failure_of(job))


def broken() -> PSError | None:
    made = service()
    made._broken(ValueError("x"))
    return made.failure


def quarantined() -> None:
    job = Job(bad_gradients="skip")
    rules = job.coordinator.job.rules
    job.coordinator.job.rules = replace(rules, quarantine_after=1)
    job.push(1, 1, problem="NON_FINITE: tensor w")
    raise PSError(job.coordinator.membership.members[1].reason)


def unsaved(problem: str = "", stop_reason: str | None = None, is_begun: bool = True) -> None:
    """Ask for a snapshot of servers that write none; with a `problem`, writing fails."""
    made = begun() if is_begun else service()
    made.stop_reason = stop_reason
    snapshots = Mock(enabled=True, problem=problem, newest_version=None)
    type(snapshots).failures = PropertyMock(side_effect=count())
    made.snapshot_scheduler._snapshots = snapshots
    if not problem:
        made.snapshot_scheduler._written = Mock(return_value=None)  # type: ignore[method-assign]
    made.snapshot_scheduler.save(0.0)


def restored(taken: int) -> None:
    """Roll back to version 3, while the shards load the snapshot of version `taken`."""
    made = service()
    made._history.restore = Mock()  # type: ignore[method-assign]
    made.registry.snapshot = Mock(version=taken)
    made.registry[0].connected = False
    made.snapshot_scheduler.restore(3, 0.0)


def no_snapshot_left(made: CoordinatorService) -> None:
    made._history._snapshots = Mock(find_before=lambda version: None)
    made.registry.snapshot = Mock(version=3)
    made._history.loaded(0, 3, "shard-0.bin is damaged")
    fail(made.failure)


def unknown_start(made: CoordinatorService) -> None:
    made._history.go_back("shard 1 was restarted", made.executor.coordinator.log_id, 3)
    fail(made.failure)


def unsaved_state(newest: int | None) -> None:
    scheduler = Mock(is_logged=False, coordinator=Mock(version=5))
    problem = final_state._last_snapshot_problem(
        scheduler, Mock(newest_version=newest), "disk full"
    )
    final_state.conclude(None, problem, 0)


def reshard(made: CoordinatorService, shards: int) -> None:
    made.reshard_requests.reshard(shards, 0.0)


def blocked_reshard(begins: bool) -> None:
    """Wait for a reshard that does not begin, or does not end."""
    made = begun()
    requests = made.reshard_requests
    requests._check = Mock()  # type: ignore[method-assign]
    requests._begin = Mock(return_value=1.0 if begins else None)  # type: ignore[method-assign]
    if begins:
        made.executor.coordinator.job.reshard = ReshardPhase(1, 1, 2, writes_snapshot=True)
    requests.reshard(2, 0.0)


def another_reshard() -> None:
    made = begun()
    made.executor.coordinator.job.reshard = ReshardPhase(1, 1, 2, writes_snapshot=True)
    reshard(made, 2)


def stored_count() -> None:
    made = service()
    made.reshard_requests._layout = Mock(change=Mock(side_effect=OSError("No space left")))
    made.reshard_requests._store_count(2)


def connect(shard: int, shards: int, term: int = 1) -> None:
    registry = simulated(2, 1, "async", None).service.registry
    registry[1].address, registry[1].connected, registry[1].instance = "h:1", True, "first"
    registry[1].term = 2
    registry.connect(shard, shards, "new:1", "second", term=term)


def described(text: str) -> None:
    """Raise a text that is part of messages and of the status."""
    assert text
    raise PSError(text)


def waiting(workers: int) -> str:
    job = Job(workers=0)
    job.coordinator.job.min_workers = 2
    for _ in range(workers):
        job.add()
    return waiting_for(job.coordinator, 1.0)


def late(workers: int) -> str:
    job = Job(workers=workers)
    job.push(1, 1)
    return waiting_for(job.coordinator, 1.5)


FAILURES: dict[str, Callable[[], object]] = {
    # the job
    "stopping": lambda: stopping()._check_goes_on(),
    "job": lambda: service().check_job("otter"),
    "plan": lambda: service().plan(),
    "bug": lambda: fail(broken()),
    "lost worker": lost_worker,
    "bad gradient": bad_gradient,
    "quarantine": quarantined,
    "drain": lambda: Job().coordinator.departures.drain(9),
    "drain without workers": lambda: Job(workers=0).coordinator.departures.drain(9),
    "fenced": lambda: fail(out_of_the_job(3, "its lease ended")),
    "unsaved": lambda: unsaved_state(None),
    "unsaved since": lambda: unsaved_state(3),
    # snapshots
    "no data directory": lambda: service().snapshot_scheduler.save(0.0),
    "nothing to save": lambda: unsaved(is_begun=False),
    "save while stopping": lambda: unsaved(stop_reason="SIGTERM"),
    "save in time": lambda: unsaved(),
    "save": lambda: unsaved("disk full"),
    "restore": lambda: restored(2),
    "restore in time": lambda: restored(3),
    "unloadable": lambda: no_snapshot_left(service()),
    "no snapshot": lambda: unknown_start(service()),
    # reshards
    "same number": lambda: reshard(begun(), 1),
    "reshard in progress": another_reshard,
    "nothing to reshard": lambda: reshard(service(), 2),
    "servers to start": lambda: reshard(begun(), 2),
    "many servers to start": lambda: reshard(begun(), 12),
    "reshard not begun": lambda: blocked_reshard(begins=False),
    "reshard not done": lambda: blocked_reshard(begins=True),
    "number of servers": stored_count,
    "servers": lambda: check_shards(0),
    # shards
    "shard of another job": lambda: connect(3, 3),
    "former primary": lambda: connect(1, 2, term=1),
    "served shard": lambda: connect(1, 2, term=2),
    # what the job waits for
    "waits for a model": lambda: described(waiting(0)),
    "waits for workers": lambda: described(waiting(1)),
    "waits for a worker": lambda: described(late(2)),
    "waits for many workers": lambda: described(late(6)),
}
TEXTS: dict[str, str] = {
    "stopping": "shard 0 is stopping: SIGTERM",
    "job": "these servers run job simulated, not otter",
    "plan": "no worker has registered a model yet",
    "bug": "a bug: ValueError('x')",
    "lost worker": (
        "worker 1 (rank 0, host pid 1, step 0) was lost: its lease ended (--on-worker-loss abort)"
    ),
    "bad gradient": ("worker 1 (rank 0, host pid 1, step 0): tensor w (--bad-gradients abort)"),
    "quarantine": (
        "QUARANTINED after 1 bad gradients in a row, the last: worker 1 (rank 0, host pid 1, "
        "step 0): tensor w"
    ),
    "drain": "worker 9 cannot be drained: it is not a member. Members: 1, 2",
    "drain without workers": "worker 9 cannot be drained: it is not a member. Members: none",
    "fenced": "worker 3 is no longer a member of the job: its lease ended",
    "unsaved": "version 5 is not saved, and there is no snapshot: disk full",
    "unsaved since": ("version 5 is not saved, and the newest snapshot is of version 3: disk full"),
    "no data directory": "these servers have no --data-dir",
    "nothing to save": "there is nothing to save yet: the job waits for the first weights",
    "save while stopping": (
        "cannot save: the servers are stopping, and take a last snapshot if possible"
    ),
    "save in time": "no snapshot after 0 s: still writing",
    "save": "the snapshot failed: disk full",
    "restore": "snapshot 3 cannot be loaded by every shard (see the servers' logs)",
    "restore in time": (
        "snapshot 3 is not loaded after 0 s: the job waits for shard 0 of 1 to connect"
    ),
    "unloadable": "no snapshot can be loaded: shard 0: shard-0.bin is damaged",
    "no snapshot": "shard 1 was restarted and there is no snapshot to go back to",
    "same number": "--servers 1 changes nothing: the job has this number already",
    "reshard in progress": (
        "a reshard to 1 servers is in progress and waits for shard 0 to build its new partition"
    ),
    "nothing to reshard": "there is nothing to reshard: no weights have arrived yet",
    "servers to start": (
        "1 of 2 servers have not started. Try: start them:\n  ps-server --shard 1/2 --join "
        "simulated-0"
    ),
    "many servers to start": (
        "11 of 12 servers have not started. Try: start them:\n  ps-server --shard 1/12 --join "
        "simulated-0\n  ps-server --shard 2/12 --join simulated-0\n  ps-server --shard 3/12 "
        "--join simulated-0\n  ps-server --shard 4/12 --join simulated-0\n  ps-server --shard "
        "5/12 --join simulated-0\n  ps-server --shard 6/12 --join simulated-0\n  ps-server "
        "--shard 7/12 --join simulated-0\n  ps-server --shard 8/12 --join simulated-0\n  and 3 "
        "more"
    ),
    "reshard not begun": "the reshard has not begun after 0 s: waiting for the end of a snapshot",
    "reshard not done": (
        "the reshard is not done after 0 s, and continues: waiting for shard 0 to build its "
        "new partition"
    ),
    "number of servers": "cannot store the number of servers: No space left",
    "servers": ("reshard refused: --servers 0 is not between 1 and 4096. Try: fewer servers"),
    "shard of another job": "shard 3/3 does not belong to this job of 2 shards",
    "former primary": (
        "this server is no longer primary of shard 1: h:1 is, in term 2 (this server: term 1)"
    ),
    "served shard": "shard 1 is already served by h:1",
    "waits for a model": "a worker to register a model",
    "waits for workers": "workers: 1 of --min-workers 2 are here",
    "waits for a worker": "worker 2 (rank 1, host pid 1, step 0), silent for 1.5 s",
    "waits for many workers": (
        "worker 2 (rank 1, host pid 1, step 0), silent for 1.5 s, worker 3 (rank 2, host pid "
        "1, step 0), silent for 1.5 s, worker 4 (rank 3, host pid 1, step 0), silent for 1.5 s "
        "and 2 more"
    ),
}


def text_of(name: str) -> str:
    with pytest.raises(PSError) as caught:
        FAILURES[name]()
    return str(caught.value)


@pytest.mark.parametrize("name", FAILURES)
def test_text(name: str) -> None:
    assert text_of(name) == TEXTS[name]


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_has_at_most_one_remedy_and_is_short(name: str) -> None:
    check_form(TEXTS[name], DETAIL_CHARACTERS.get(name, 0))
