"""With --global-batch an update takes a fixed number of batches for any number of workers."""

import random
from collections.abc import Sequence

import pytest

from pscommon.core.data_loop import LoopSpec
from psserver.core.data.map_loop import MapLoop, shares


def loop(size: int, units: int, epochs: int = 1) -> MapLoop:
    data = MapLoop(LoopSpec(0, size=size, batch_size=1, epochs=epochs))
    data.units = units
    return data


class DrawRound:
    """Workers that fetch their shares of a draw in any order and commit them together."""

    def __init__(self, data: MapLoop, workers: Sequence[int]) -> None:
        self.data = data
        self.workers = list(workers)
        self.received = dict.fromkeys(workers, 0)

    def fetch(self, order: Sequence[int]) -> dict[int, list[int]]:
        """Fetch all of each worker's share, one batch at a time."""
        got: dict[int, list[int]] = {worker: [] for worker in self.workers}
        for worker in order:
            while numbers := self.data.take(worker, self.received[worker], 1, self.workers):
                self.received[worker] += 1
                got[worker] += numbers
                if self.data.following(worker, numbers) == [0]:
                    break
        return got

    def commit(self, got: dict[int, list[int]]) -> None:
        for worker, numbers in got.items():
            assert all(self.data.commit(worker, number) for number in numbers)


def test_shares_are_contiguous_and_of_even_size() -> None:
    for count in range(30):
        for parts in range(1, 8):
            dealt = shares(range(count), parts)

            assert [n for part in dealt for n in part] == list(range(count))
            assert sorted(map(len, dealt), reverse=True) == list(map(len, dealt))
            assert len(dealt[0]) - len(dealt[-1]) <= 1


def test_a_draw_is_shared_in_worker_order_for_any_order_of_requests() -> None:
    for order in ([1, 2, 3], [3, 1, 2], [2, 3, 1]):
        assert DrawRound(loop(9, units=7), [1, 2, 3]).fetch(order) == {
            1: [0, 1, 2],
            2: [3, 4],
            3: [5, 6],
        }


@pytest.mark.parametrize("workers", range(1, 9))
def test_updates_take_the_same_batches_for_any_number_of_workers(workers: int) -> None:
    """A draw never spans two epochs: the last one takes the rest."""
    data = loop(10, units=4, epochs=2)
    round_ = DrawRound(data, range(1, workers + 1))
    updates = []
    while not data.done:
        got = round_.fetch(round_.workers)
        updates.append([n for numbers in got.values() for n in numbers])
        round_.commit(got)

    assert updates == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
        [10, 11, 12, 13],
        [14, 15, 16, 17],
        [18, 19],
    ]


def test_each_batch_carries_the_number_that_follow_in_its_push() -> None:
    data = loop(9, units=5)

    assert data.take(1, 0, 9, [1, 2]) == [0, 1, 2, 5, 6]
    assert data.following(1, [0, 1, 2, 5, 6]) == [2, 1, 0, 1, 0]
    assert data.take(1, 1, 9, [1, 2]) == [1, 2, 5, 6]
    assert data.following(1, [1, 2]) == [1, 0]


def test_a_worker_without_a_share_waits_until_the_update_has_counted() -> None:
    """Prefetching runs ahead of the updates, but never past an update without a share."""
    data = loop(7, units=2)
    assert data.take(3, 0, 1, [1, 2, 3]) == []
    assert data.take(1, 0, 2, [1, 2, 3]) == [0, 2]
    data.units = 3
    assert data.take(1, 2, 1, [1, 2, 3]) == [4]
    assert data.take(2, 0, 3, [1, 2, 3]) == [1, 3, 5]

    for worker, number in ((1, 0), (2, 1), (1, 2)):
        assert not data.has_dealt(3)
        assert not data.leases.has_sent(3)
        assert data.take(3, 0, 1, [1, 2, 3]) == []
        data.commit(worker, number)
    assert data.take(3, 0, 1, [1, 2, 3]) == [6]


def test_a_worker_that_sat_out_takes_part_in_exactly_the_next_update() -> None:
    data = loop(5, units=3, epochs=2)
    workers = [1, 2, 3]
    got = {w: data.take(w, 0, 2, workers) for w in workers}
    assert got == {1: [0, 3], 2: [1, 4], 3: [2]}
    assert data.take(1, 2, 1, workers) == [5]
    for worker, number in ((1, 0), (2, 1), (3, 2)):
        assert not data.has_dealt(3)
        data.commit(worker, number)
    assert data.take(3, 1, 1, workers) == []
    assert not data.leases.has_sent(3)

    data.commit(1, 3)
    assert data.has_dealt(3)
    assert data.take(3, 1, 1, workers) == [7]


def test_batches_of_a_lost_worker_come_in_the_next_update_before_new_ones() -> None:
    data = loop(10, units=4, epochs=1)
    assert data.take(1, 0, 2, [1, 2]) == [0, 1]
    assert data.take(2, 0, 1, [1, 2]) == [2]
    data.lose(2)
    data.commit(1, 0), data.commit(1, 1)

    assert data.take(1, 2, 4, [1]) == [2, 3, 4, 5]


def test_returned_batches_are_not_mixed_with_the_next_epoch() -> None:
    data = loop(4, units=4, epochs=2)
    assert data.take(1, 0, 2, [1, 2]) == [0, 1]
    data.give_back(2)
    data.commit(1, 0), data.commit(1, 1)

    assert data.take(1, 2, 9, [1]) == [2, 3, 4, 5, 6, 7]
    assert data.following(1, [2, 3, 4, 5, 6, 7]) == [1, 0, 3, 2, 1, 0]


def test_an_update_whose_holders_are_all_lost_delays_no_worker() -> None:
    data = loop(8, units=1)
    assert data.take(1, 0, 2, [1, 2]) == [0, 1]
    assert data.take(2, 0, 1, [1, 2]) == []
    data.lose(1)

    assert data.take(2, 0, 1, [2]) == [0]


def test_every_batch_counts_once_and_updates_are_complete_without_losses() -> None:
    """500 random jobs: any batches, units, workers, epochs, prefetch; workers are lost, replaced
    and join.
    """
    for seed in range(500):
        rng = random.Random(seed)
        data = loop(rng.randint(1, 25), units=rng.randint(1, 6), epochs=rng.randint(1, 3))
        job = RandomJob(data, rng)
        while not data.done:
            job.update()

        assert sorted(job.counted) == list(range(data.spec.total)), seed


class RandomJob:
    """A sync job of workers that prefetch; each update closes over all workers with a share."""

    def __init__(self, data: MapLoop, rng: random.Random) -> None:
        self.data = data
        self.rng = rng
        self.workers = list(range(1, rng.randint(1, 5) + 1))
        self.last = self.workers[-1]
        self.received: dict[int, int] = {}
        self.hand: dict[int, list[tuple[int, int]]] = {}
        self.counted: list[int] = []
        self.is_complete = True

    def ask(self, worker: int) -> None:
        received = self.received.get(worker, 0)
        numbers = self.data.take(worker, received, self.rng.randint(1, 3), self.workers)
        self.received[worker] = received + len(numbers)
        self.hand.setdefault(worker, []).extend(
            zip(numbers, self.data.following(worker, numbers), strict=True)
        )

    def group(self, worker: int) -> list[int]:
        """Return what a worker pushes next; nothing if it has no share."""
        while not (hand := self.hand.get(worker, [])) or not any(after == 0 for _, after in hand):
            before = len(hand)
            self.ask(worker)
            if len(self.hand[worker]) == before:
                assert before == 0, "a part of a group"
                return []
        end = [after for _, after in hand].index(0) + 1
        return [number for number, _ in hand[:end]]

    def update(self) -> None:
        groups = {
            worker: self.group(worker)
            for worker in self.rng.sample(self.workers, len(self.workers))
        }
        # a request of another worker may have given these workers batches
        groups |= {worker: self.group(worker) for worker in self.workers if not groups[worker]}
        self.check([number for worker in self.workers for number in groups[worker]])
        if self.rng.random() < 0.1:
            return self.disturb()
        for worker in self.workers:
            for number in groups[worker]:
                assert self.data.commit(worker, number)
                self.counted.append(number)
            self.hand[worker] = self.hand[worker][len(groups[worker]) :]
        return None

    def check(self, numbers: list[int]) -> None:
        """Check that an update is one draw of one epoch, smaller only at an epoch's end or after a
        loss.
        """
        assert numbers
        spec = self.data.spec
        assert len({spec.epoch(number) for number in numbers}) == 1
        assert len(numbers) <= (self.data.units or 0)
        if self.is_complete:
            assert numbers == sorted(numbers)
            ends_epoch = spec.position(numbers[-1]) == spec.batches_in_epoch - 1
            assert len(numbers) == self.data.units or ends_epoch

    def disturb(self) -> None:
        """Lose, replace or add a worker."""
        place = self.rng.randrange(len(self.workers))
        victim, self.last = self.workers[place], self.last + 1
        kind = self.rng.choice(["lost", "replaced", "joined"])
        if kind == "joined":
            self.workers.append(self.last)
            return
        if kind == "replaced":
            self.workers[place] = self.last
            self.data.transfer(victim, self.last)
        elif len(self.workers) > 1:
            self.is_complete = False
            self.workers.remove(victim)
        self.hand.pop(victim, None)
        self.data.lose(victim)
