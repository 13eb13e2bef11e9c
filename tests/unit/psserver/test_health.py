"""Health of workers: live, slow, silent, lost, left, and the duration of a worker's own step."""

import pytest

from psserver.core.commands.recorder import Recorder
from psserver.core.commands.worker_commands import Join
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psserver.core.job.snapshot_schedule import SnapshotInterval
from psserver.core.workers.health import MIN_OVERDUE_SECONDS, WorkerHealth, conditions
from psserver.core.workers.members import (
    MAX_STEPS,
    MIN_STEPS,
    Member,
    StepTimer,
    WorkerState,
    median,
)
from psserver.core.workers.membership import Membership
from psserver.monitoring.worker_monitor import find_conditions
from tests.support.coordinator_job import LOOP, Job

LEASE = 5.0


def paced(*steps: float) -> StepTimer:
    pace = StepTimer()
    for step in steps:
        pace.begin(10.0)
        pace.end(10.0 + step)
    return pace


def member(
    membership: Membership,
    step: float | None,
    state: WorkerState = WorkerState.ACTIVE,
    now: float = 0.0,
) -> Member:
    """Return a member with this step duration that was last seen at `now`."""
    found = membership.join(now, None, "host", 1, "cpu")
    membership.index.set_state(found, state)
    found.step_timer = paced(*[step] * MIN_STEPS) if step is not None else StepTimer()
    return found


def membership_with(*steps: float | None) -> tuple[Membership, list[Member]]:
    membership = Membership(LEASE)
    return membership, [member(membership, step) for step in steps]


def healths(membership: Membership, late: tuple[int, ...] = (), now: float = 0.0) -> list[str]:
    return [str(condition.health) for condition in conditions(membership, late, now).values()]


# ---- pace ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "middle"), [([7], 7), ([9, 1], 5), ([5, 1, 9], 5), ([9, 1, 6, 4], 5)]
)
def test_the_median_is_the_middle_value(values: list[float], middle: float) -> None:
    assert median(values) == middle


def test_the_pace_is_the_median_of_the_latest_steps() -> None:
    assert paced(*[1.0] * (MIN_STEPS - 1)).median_seconds is None
    assert paced(1.0, 50.0, 2.0).median_seconds == pytest.approx(2.0)
    assert paced(9.0, 9.0, 9.0, *[1.0] * MAX_STEPS).median_seconds == pytest.approx(1.0)


def test_a_step_with_an_unknown_start_is_not_measured() -> None:
    pace = paced(1.0, 1.0)
    pace.end(99.0)  # a repeated end
    pace.begin(10.0)
    pace.discard()
    pace.end(99.0)
    assert pace.median_seconds is None

    pace.begin(10.0)
    pace.add_pause(5.0)
    pace.end(16.0)
    assert pace.median_seconds == pytest.approx(1.0)


# ---- health --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "health"), [(0.5, "live"), (2.0, "live"), (2.01, "slow"), (20.0, "slow")]
)
def test_a_worker_is_slow_above_twice_the_median_of_the_others(step: float, health: str) -> None:
    membership, _ = membership_with(step, 0.9, 1.0, 1.1)

    assert healths(membership) == [health, "live", "live", "live"]


@pytest.mark.parametrize(
    "steps",
    [(), (3.0,), (2.0, 2.0), (5.0, 1.0, 3.0), (4.0, 1.0, 1.0, 7.0), (9.0, 2.0, 6.0, 2.0, 5.0)],
)
def test_the_median_of_the_others_excludes_the_worker(steps: tuple[float, ...]) -> None:
    membership, members = membership_with(*steps, None)
    found = conditions(membership, (), 0.0)

    for place, each in enumerate(members):
        others = [seconds for other, seconds in enumerate(steps) if other != place]
        assert found[each.worker].median == (pytest.approx(median(others)) if others else None)


def test_the_cost_of_a_check_is_linear_in_the_active_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[StepTimer] = []
    get_median = StepTimer.median_seconds.fget
    assert get_median is not None
    monkeypatch.setattr(
        StepTimer,
        "median_seconds",
        property(lambda pace: (asked.append(pace), get_median(pace))[1]),
    )
    membership, members = membership_with(*[1.0] * 20)
    for member in members[:10]:
        membership.remove(member, WorkerState.LEFT, "")

    conditions(membership, (), 0.0)

    assert len(asked) == 10


def test_a_slow_worker_does_not_raise_its_own_threshold() -> None:
    """The threshold uses the median of the other workers."""
    membership, (slow, quick) = membership_with(10.0, 1.0)

    found = conditions(membership, (), 0.0)

    assert found[slow.worker][1:] == pytest.approx((10.0, 1.0))
    assert found[quick.worker][1:] == pytest.approx((1.0, 10.0))
    assert [found[m.worker].health for m in (slow, quick)] == [WorkerHealth.SLOW, WorkerHealth.LIVE]


def test_no_worker_is_slow_when_alone_or_too_new() -> None:
    assert healths(membership_with(10.0)[0]) == ["live"]
    assert healths(membership_with(10.0, None, None)[0]) == ["live"] * 3


@pytest.mark.parametrize("state", [WorkerState.JOINED, WorkerState.IDLE])
def test_a_worker_outside_the_rounds_is_not_slow(state: WorkerState) -> None:
    membership, _ = membership_with(1.0)
    member(membership, 10.0, state)

    assert healths(membership) == ["live", "live"]


def test_an_awaited_step_is_slow_as_soon_as_it_exceeds_the_threshold() -> None:
    membership, (stuck, _) = membership_with(1.0, 1.0)
    stuck.last_seen, stuck.step_timer.started_at = 2.0, 0.0

    assert healths(membership, (stuck.worker,), 2.0) == ["live", "live"]
    assert healths(membership, (stuck.worker,), 2.1) == ["slow", "live"]
    assert healths(membership, (), 2.1) == ["live", "live"], "no worker waits for it"
    assert conditions(membership, (stuck.worker,), 2.1)[stuck.worker].seconds == pytest.approx(2.1)
    stuck.step_timer.started_at = None
    assert healths(membership, (stuck.worker,), 2.1) == ["live", "live"], "its step has not begun"


def test_a_short_wait_makes_no_worker_slow() -> None:
    membership, (late, _) = membership_with(0.001, 0.001)
    late.step_timer.started_at = 0.0

    assert healths(membership, (late.worker,), MIN_OVERDUE_SECONDS) == ["live", "live"]
    assert healths(membership, (late.worker,), MIN_OVERDUE_SECONDS + 0.01) == ["slow", "live"]


def test_silence_for_half_a_lease_precedes_slow() -> None:
    membership, _ = membership_with(10.0, 1.0)

    assert healths(membership, now=LEASE / 2) == ["slow", "live"]
    assert healths(membership, now=LEASE / 2 + 0.1) == ["silent", "silent"]


def test_departed_workers_have_no_condition() -> None:
    membership, members = membership_with(10.0, 1.0, 1.0)
    membership.remove(members[0], WorkerState.LOST, "its lease ended")
    membership.remove(members[1], WorkerState.LEFT, "")

    assert healths(membership, now=99.0) == ["silent"]


# ---- what the coordinator measures ---------------------------------------------------------------


class TimedWorkers(Job):
    """Worker 1 takes `quick` seconds for its own step, worker 2 `slow`."""

    def round(self, seq: int, quick: float, slow: float) -> None:
        self.now += quick
        self.push(1, seq)
        self.now += slow - quick
        self.push(2, seq)

    def seen(self) -> list[tuple[str, float | None]]:
        self.beat()
        found = find_conditions(self.coordinator, self.now)
        return [
            (
                str(found[worker].health),
                self.coordinator.membership.members[worker].step_timer.median_seconds,
            )
            for worker in (1, 2)
        ]

    def beat(self) -> None:
        for each in (1, 2):
            self.coordinator.job.member(each, self.now)


def test_waiting_for_others_is_no_part_of_a_step() -> None:
    """Under sync all take equally long between pushes; only one of them is slow."""
    job = TimedWorkers(shards=2)
    for seq in range(1, 6):
        job.round(seq, quick=0.1, slow=1.0)

    (quick, seconds), (slow, more) = job.seen()

    assert (quick, slow) == ("live", "slow")
    assert (seconds, more) == (pytest.approx(0.1), pytest.approx(1.0))


def test_an_awaited_worker_is_slow_before_it_has_pushed() -> None:
    job = TimedWorkers()
    for seq in range(1, 6):
        job.round(seq, quick=0.1, slow=0.12)
    assert [name for name, _ in job.seen()] == ["live", "live"]

    job.push(1, 6)
    job.now += 3.0

    assert [name for name, _ in job.seen()] == ["live", "slow"]
    job.push(2, 6)
    assert [name for name, _ in job.seen()] == ["live", "live"], "one hiccup"


def test_the_worker_that_holds_others_at_the_ssp_bound_is_slow() -> None:
    job = TimedWorkers(policy("ssp", 2))
    for seq in range(1, 6):
        job.round(seq, quick=0.1, slow=0.12)
    for seq in (6, 7):
        job.now += 0.2
        job.push(1, seq)
        assert [name for name, _ in job.seen()] == ["live", "live"], "no worker waits for it yet"

    job.push(1, 8)

    assert [name for name, _ in job.seen()] == ["live", "slow"]


def test_the_first_step_is_not_measured_from_before_the_start_of_the_job() -> None:
    job = TimedWorkers()
    job.now += 100.0  # for example, one worker waited for the other
    for seq in range(1, MIN_STEPS + 1):
        job.round(seq, quick=0.1, slow=0.1)
    assert [seconds for _, seconds in job.seen()] == [None, None]

    job.round(MIN_STEPS + 1, quick=0.1, slow=0.1)

    assert [seconds for _, seconds in job.seen()] == [pytest.approx(0.1)] * 2


def test_a_wait_for_data_is_no_part_of_a_step() -> None:
    job = TimedWorkers(policy("async"))
    for seq in range(1, MIN_STEPS + 1):
        job.round(seq, quick=0.1, slow=0.1)
    for number in range(LOOP.size):
        job.ask(1, received=number)
    job.ask(2, idle=True)
    job.now += 100.0

    job.push(2, MIN_STEPS + 1)

    assert job.seen()[1][1] is None, "still a step too few"


def test_a_recovered_coordinator_measures_from_its_start() -> None:
    job = TimedWorkers()
    for seq in range(1, 6):
        job.round(seq, quick=0.1, slow=1.0)

    job.recorder.recovered(job.now, generation=1)

    assert [seconds for _, seconds in job.seen()] == [None, None]


@pytest.mark.parametrize(
    ("lease", "stall", "is_lost"), [(0.5, 0.6, False), (5.0, 6.0, False), (5.0, 0.9, True)]
)
def test_no_worker_is_lost_while_the_server_process_is_suspended(
    lease: float, stall: float, is_lost: bool
) -> None:
    """Shorter gaps are normal; the lease runs on in these."""
    coordinator = CoordinatorMachine(1, JobRules(policy("async"), 1, lease, SnapshotInterval()))
    recorder, now = Recorder(coordinator), 100.0
    worker = recorder.do(Join(rank=None, host="h", pid=1, device="cpu"), now).worker
    recorder.tick(now)
    lost: list[Member] = []
    while now < 100.0 + lease:
        now += stall
        lost += recorder.tick(now)
    assert [member.worker for member in lost] == [worker] * is_lost
