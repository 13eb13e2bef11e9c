"""What sync, async and ssp guarantee, seen by scripts, in the weights and in the status."""

import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from pscommon.core.errors import UnreachableError
from pscommon.core.log_entries import Apply, PushKey, ShardReport, Staged
from pscommon.core.model_spec import ModelSpec, TensorSpec
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psworker import Client, OptimizerSpec
from psworker.transport.exchange_calls import ExchangeAnswer
from psworker.transport.grpc_transport import GrpcTransport
from tests.support.cluster import Cluster
from tests.support.policies import POLICIES
from tests.support.workers import (
    ONES,
    connected,
    count,
    counted,
    counter,
    status,
    together,
    until,
    weights_of,
)

Make = Callable[..., Cluster]
Array = np.ndarray[Any, np.dtype[Any]]
SGD = OptimizerSpec("sgd", lr=1.0)


# ---- sync ----------------------------------------------------------------------------------------


@contextmanager
def connected_workers(address: str, count: int, value: Array) -> Iterator[list[Client]]:
    """Workers of ranks 0, 1, ... that train one tensor `w`, SGD with learning rate 1."""
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(address, rank)) for rank in range(count)]
        for client in clients:
            client.register({"w": value}, SGD)
        yield clients


def test_a_round_is_the_mean_weighted_by_samples(cluster: Make) -> None:
    address = cluster(2, min_workers=2).address
    with connected_workers(address, 2, np.zeros(40, np.float32)) as (first, second):
        results = together(
            lambda: first.push({"w": np.full(40, 1.0, np.float32)}, samples=1),
            lambda: second.push({"w": np.full(40, 5.0, np.float32)}, samples=3),
        )

        assert [(r.status, r.version, r.staleness) for r in results] == [("applied", 1, 0)] * 2
        assert np.array_equal(first.pull()["w"], np.full(40, -4.0, np.float32))


def test_a_round_closes_only_with_all_its_workers(cluster: Make) -> None:
    address = cluster(1, min_workers=3).address
    with (
        connected_workers(address, 3, np.zeros(4, np.float32)) as clients,
        ThreadPoolExecutor(3) as pool,
    ):
        for number, client in enumerate(clients, start=1):
            assert status(address)["version"] == 0
            pushing = pool.submit(client.push, {"w": np.ones(4, np.float32)})
            until_it_waits_for(address, clients[number:])

        assert pushing.result(30).version == status(address)["version"] == 1


def test_rounds_are_summed_in_worker_order_for_any_order_of_arrival(cluster: Make) -> None:
    """Each order of arrival on its own element: the bits are those of the sum 0, 1, 2."""
    values = np.float32([1e8, 3.0, -1e8])
    address, orders = cluster(2, min_workers=3).address, list(permutations(range(3)))
    with (
        connected_workers(address, 3, np.zeros(len(orders), np.float32)) as clients,
        ThreadPoolExecutor(3) as pool,
    ):
        for number, order in enumerate(orders):
            pushes = []
            for place, rank in enumerate(order, start=1):
                gradient = np.zeros(len(orders), np.float32)
                gradient[number] = values[rank]
                pushes.append(pool.submit(clients[rank].push, {"w": gradient}))
                until_it_waits_for(address, [clients[other] for other in order[place:]])
            assert [push.result(30).version for push in pushes] == [number + 1] * 3
        result = clients[0].pull()["w"]

    sums = {order: weighted_sum([values[rank] for rank in order]) for order in orders}
    assert result.tolist() == [-sums[0, 1, 2]] * len(orders)
    assert len(set(sums.values())) > 1, "no order makes a difference: the test proves nothing"


def until_it_waits_for(address: str, late: Sequence[Client]) -> None:
    """Wait until the round waits for exactly these."""
    expected = sorted(f"worker {client.worker}" for client in late)

    def found() -> bool:
        return sorted(re.findall(r"worker \d+", status(address)["waiting_for"])) == expected

    until(found, f"a wait for {expected}")


def weighted_sum(values: Sequence[np.float32]) -> float:
    """Return the sum in float32, in this order, each with a third of the weight."""
    total = values[0] * np.float32(1 / 3)
    for value in values[1:]:
        total = np.float32(np.float64(total) + np.float64(value) * np.float64(np.float32(1 / 3)))
    return float(total)


# ---- ssp -----------------------------------------------------------------------------------------


class SimulatedRace:
    """Workers of very different speeds that push to a coordinator, join and leave at random. It
    keeps its own clocks: an applied push is a step; a new worker starts at the slowest clock.
    """

    def __init__(self, staleness: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.coordinator = CoordinatorMachine(1, JobRules(policy("ssp", staleness), lease=1e9))
        self.clocks: dict[int, int] = {}
        self.spreads: dict[int, int] = {}
        self.pushes = self.delayed = 0
        self._speeds: dict[int, float] = {}
        self._sent: dict[int, int] = {}
        self._staged: dict[int, Staged] = {}
        self._seen = 0
        self.join()

    def run(self, pushes: int) -> None:
        while self.pushes < pushes:
            chance = self.random.random()
            if chance < 0.004 and len(self.clocks) < 6:
                self.join()
            elif chance < 0.007 and len(self.clocks) > 1:
                self.leave(self.random.choice(list(self.clocks)))
            else:
                self.step()

    def join(self) -> None:
        model = ModelSpec((TensorSpec("w", (1,), "float32"),), SGD)
        worker = self.coordinator.membership.join(0.0, None, "host", 1, "cpu").worker
        self._speeds[worker], self._sent[worker] = self.random.choice([0.05, 1.0, 1.0, 5.0]), 0
        while self.coordinator.registration.register(worker, model, 0.0) == "upload":
            self.report(Staged(PushKey(worker, 0), 1, 0))
        self.clocks[worker] = min(self.clocks.values(), default=0)

    def leave(self, worker: int) -> None:
        del self.clocks[worker]
        self._staged.pop(worker, None)
        self.coordinator.registration.leave(worker, "", 0.0)
        self.record_decisions()

    def step(self) -> None:
        """Let some worker that does not wait for its push finish a step."""
        free = [worker for worker in self.clocks if worker not in self._staged]
        if not free:
            raise AssertionError("deadlock: every worker waits")
        (worker,) = self.random.choices(free, [self._speeds[worker] for worker in free])
        self._sent[worker] += 1
        self._staged[worker] = Staged(PushKey(worker, self._sent[worker]), 1, 0)
        self.report()
        self.delayed += worker in self._staged

    def report(self, *more: Staged) -> None:
        staged, index = (*self._staged.values(), *more), self.coordinator.log.index
        self.coordinator.reports.process(ShardReport(0, 0, index, staged), 0.0)
        self.record_decisions()

    def record_decisions(self) -> None:
        """Record the decisions, one update at a time."""
        for entry in self.coordinator.log.after(self._seen):
            self._seen = entry.index
            for contribution in entry.contributions if isinstance(entry, Apply) else ():
                worker = contribution.key.worker
                assert self._staged.pop(worker).key == contribution.key
                self.clocks[worker] += 1
                self.pushes += 1
            spread = max(self.clocks.values(), default=0) - min(self.clocks.values(), default=0)
            self.spreads[spread] = self.spreads.get(spread, 0) + 1


@pytest.mark.every(4)
@pytest.mark.parametrize("staleness", [1, 2, 3, 8])
def test_in_100_000_pushes_no_worker_exceeds_the_bound(staleness: int) -> None:
    """25 000 for each of four bounds. The bound is reached, pushes do wait, and none waits
    forever.
    """
    race = SimulatedRace(staleness, seed=staleness)
    race.run(25_000)

    assert max(race.spreads) == staleness
    assert race.delayed > 1000
    assert race.coordinator.job.version == race.pushes


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_slow_worker_delays_the_others_exactly_at_the_bound(
    cluster: Make, staleness: int
) -> None:
    """Real servers. The fast workers never exceed the pushes that the slow one has begun
    by more.
    """
    steps, finished, begun = 8, [0, 0, 0], [0]
    spreads: list[int] = []
    address = cluster(2, policy="ssp", staleness=staleness, min_workers=3).address

    def fast(rank: int) -> None:
        with counter(address, rank) as client:
            for _ in range(steps):
                count(client)
                finished[rank] += 1
                spreads.append(finished[rank] - begun[0])

    def slow() -> None:
        with counter(address, 0) as client, connected(address, observe=True) as observer:
            for step in range(steps):
                ahead = min(step + staleness, steps)
                until(
                    lambda ahead=ahead: clocks_ahead(observer, ahead, steps),
                    f"clocks {ahead} and two that wait",
                )  # type: ignore[misc]
                assert clocks(observer) == [step, ahead, ahead]
                begun[0] += 1
                count(client)

    together(slow, lambda: fast(1), lambda: fast(2))

    assert max(spreads) == staleness
    assert clocks_of(status(address)) == [steps] * 3
    assert counted(weights_of(address)) == 3 * steps


def clocks_of(seen: dict[str, Any]) -> list[int]:
    return [row["clock"] for row in seen["workers"]]


def clocks(observer: Client) -> list[int]:
    return clocks_of(observer.status())


def clocks_ahead(observer: Client, ahead: int, steps: int) -> bool:
    """Wait until the fast ones have another push staged, which names the slow one as awaited."""
    seen = observer.status()
    _, *fast = clocks_of(seen)
    # a fast one may not have joined yet
    assert max(fast, default=0) <= ahead, "more than the bound"
    return fast == [ahead] * 2 and (ahead == steps or "rank 0" in seen["waiting_for"])


# ---- async and the answers -----------------------------------------------------------------------


def test_async_applies_at_once_and_a_slow_worker_delays_no_other(cluster: Make) -> None:
    """One thread for both: a push that waited for the other worker would wait forever."""
    address = cluster(2, policy="async", min_workers=2).address
    with counter(address, 1) as slow, counter(address, 0, wait_timeout=5.0) as fast:
        for version in range(1, 21):
            result = fast.push_pull(ONES)
            assert (result.status, result.version, result.staleness) == ("applied", version, 0)
        late = slow.push_pull(ONES)
        again = slow.push(ONES)

        assert (late.status, late.version, late.staleness) == ("applied", 21, 20)
        assert (again.status, again.version, again.staleness) == ("applied", 22, 0)
        assert counted(fast.pull()) == 22


def test_a_gradient_beyond_max_staleness_is_refused_and_its_worker_continues(cluster: Make) -> None:
    address = cluster(2, policy="async", max_staleness=2, min_workers=2).address
    with counter(address, 1) as slow, counter(address, 0) as fast:
        for _ in range(2):
            fast.push_pull(ONES)
        assert slow.push_pull(ONES).staleness == 2
        for _ in range(3):
            fast.push_pull(ONES)

        stale = slow.push_pull(ONES)
        fresh = slow.push(ONES)

        assert (stale.status, stale.version, stale.staleness) == ("stale", 6, 3)
        assert stale.reason.startswith("STALE: ")
        assert (fresh.status, fresh.version, fresh.staleness) == ("applied", 7, 0)
        assert counted(fast.pull()) == 7
    assert status(address)["pushes"] == {"applied": 7, "stale": 1, "rejected": 0, "duplicate": 0}


def test_a_non_finite_gradient_is_rejected_by_name_before_anything_changes(
    cluster: Make,
) -> None:
    """The round keeps waiting for a good one of that worker."""
    address = cluster(2, min_workers=2, bad_gradients="skip").address
    with counter(address, 0) as good, counter(address, 1) as bad, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(good.push, ONES)
        rejected = bad.push_pull(ONES | {"a": np.full((3, 40), np.nan, np.float32)})

        assert (rejected.status, rejected.version) == ("rejected", 0)
        assert rejected.reason.startswith(f"NON_FINITE: worker {bad.worker} (rank 1, ")
        assert rejected.reason.endswith("tensor a")
        assert not waiting.done()
        assert bad.push(ONES).version == waiting.result(30).version == 1
        assert counted(bad.pull()) == 1


class LosesAnswersLane(GrpcTransport):
    """Delivers everything, but loses the answers of shard `deaf`."""

    deaf: int | None = None

    def exchange(self, shard: int, *args: Any, **kwargs: Any) -> ExchangeAnswer:
        answer = super().exchange(shard, *args, **kwargs)
        if shard == self.deaf:
            raise UnreachableError(f"shard {shard}: the answer was lost")
        return answer


def test_a_push_repeated_after_an_error_is_a_duplicate(cluster: Make) -> None:
    servers = cluster(2, policy="async")
    lane = LosesAnswersLane(servers.addresses.split(","))
    with Client(lane=lane, connect_timeout=0.2) as client:
        client.register({name: np.zeros_like(one) for name, one in ONES.items()}, SGD)
        lane.deaf = 1
        with pytest.raises(UnreachableError, match="the answer was lost"):
            client.push(ONES)
        lane.deaf = None

        again = client.push(ONES)
        new = client.push(ONES)

        assert (again.status, again.version) == ("duplicate", 1)
        assert (new.status, new.version) == ("applied", 2)
        assert counted(client.pull()) == 2


# ---- ends ----------------------------------------------------------------------------------------


@pytest.mark.every(4)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_with_different_amounts_of_work_all_finish(
    cluster: Make, name: str, workers: int
) -> None:
    """Worker r makes 3 + 4 r steps; one without work leaves its rounds."""
    address = cluster(2, min_workers=workers, **POLICIES[name]).address
    amounts = [3 + 4 * rank for rank in range(workers)]

    def work(rank: int) -> None:
        with counter(address, rank) as client:
            count(client, amounts[rank])

    together(*[lambda rank=rank: work(rank) for rank in range(workers)])  # type: ignore[misc]

    seen = status(address)
    assert [row["steps"] for row in seen["workers"]] == amounts
    assert seen["version"] == (max(amounts) if name == "sync" else sum(amounts))
    assert seen["finished"] == workers


@pytest.mark.parametrize("name", POLICIES)
def test_a_late_worker_starts_at_the_slowest_clock(cluster: Make, name: str) -> None:
    address, halfway, come = (
        cluster(1, min_workers=2, **POLICIES[name]).address,
        threading.Barrier(2),
        threading.Event(),
    )

    def work(rank: int) -> None:
        with counter(address, rank) as client:
            count(client, 10)
            halfway.wait(30)
            assert come.wait(30)
            count(client, 10)

    def late() -> None:
        until(lambda: status(address)["steps"] == 20, "half of the work")
        with counter(address, 2) as client:
            assert clocks_of(status(address)) == [10, 10, 10]
            come.set()
            count(client, 5)

    together(lambda: work(0), lambda: work(1), late)

    seen = status(address)
    assert [row["steps"] for row in seen["workers"]] == [20, 20, 5]
    assert clocks_of(seen) == [20, 20, 15]
