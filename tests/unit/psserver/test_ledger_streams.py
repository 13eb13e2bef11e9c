"""Streams: sources of unknown length, each read by one worker at a time; each sample
counts once.
"""

import json
import random

import pytest

from pscommon.core.data_stream import StreamSpec, spec_from_dict
from pscommon.core.log_entries import BatchKey
from psserver.core.data.data_ledger import DataLedger
from psserver.core.data.stream_loop import StreamLoop


def stream(sources: int = 2, batch_size: int = 4, epochs: int = 1) -> StreamLoop:
    return StreamLoop(StreamSpec(0, sources, batch_size, epochs))


def places(data: StreamLoop, numbers: list[int]) -> list[tuple[int, int]]:
    return [(data.spec.source(number), data.spec.offset(number)) for number in numbers]


def test_a_batch_number_encodes_a_source_and_an_offset() -> None:
    spec = StreamSpec(0, sources=3, batch_size=5, epochs=2)
    for lap in range(spec.laps):
        for place in range(4):
            number = spec.number(lap, place)
            assert (spec.lap(number), spec.lap_index(number)) == (lap, place)
            assert (spec.epoch(number), spec.source(number), spec.offset(number)) == (
                lap // 3,
                lap % 3,
                place * 5,
            )
    assert spec_from_dict(spec.as_dict()) == spec


@pytest.mark.parametrize("wrong", [{"sources": 0}, {"batch_size": 0}, {"loop": -1}, {"epochs": -1}])
def test_invalid_streams_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|negative"):
        StreamSpec(**{"loop": 0, "sources": 1, "batch_size": 1} | wrong)


def test_each_worker_reads_its_own_source_and_waits_without_one() -> None:
    data = stream(sources=2)
    workers = [1, 2, 3]

    assert places(data, data.take(2, 0, 1, workers)) == [(1, 0)]
    assert places(data, data.take(1, 0, 2, workers)) == [(0, 0), (0, 4)]
    assert data.take(3, 0, 1, workers) == []
    assert not data.leases.has_sent(3)


def test_a_source_ends_at_its_readers_report_and_the_reader_gets_the_next() -> None:
    data = stream(sources=3)
    first = data.take(1, 0, 2, [1])
    data.ends(first[1], count=3)
    data.commit(1, first[0])
    assert data._laps.committed == 0
    data.commit(1, first[1])

    assert data._laps.committed == 1
    assert places(data, data.take(1, 2, 1, [1])) == [(1, 0)]


def test_batches_dealt_past_the_end_belong_to_no_worker() -> None:
    data = stream(sources=1)
    numbers = data.take(1, 0, 3, [1])
    data.ends(numbers[1], count=0)

    assert len(data.leases) == 1
    data.commit(1, numbers[0])
    assert data.done


def test_an_empty_source_is_complete_when_its_reader_reports_it() -> None:
    ledger = DataLedger()
    data = ledger.open(1, StreamSpec(0, sources=1, batch_size=4))
    (number,) = data.take(1, 0, 1, [1])
    ledger.put_back(1, [BatchKey(0, number, 0, True)])

    assert data.done
    assert (data.committed, len(data.leases)) == (0, 0)


def test_the_last_batch_of_a_source_is_dealt_again_when_it_is_returned() -> None:
    """After a stale push the end of the source stays known; the batch does not count."""
    ledger = DataLedger()
    data = ledger.open(1, StreamSpec(0, sources=1, batch_size=4))
    (number,) = data.take(1, 0, 1, [1])
    ledger.put_back(1, [BatchKey(0, number, 3, True)])

    assert not data.done
    assert data.take(2, 0, 9, [2]) == [number]
    ledger.commit(2, [BatchKey(0, number, 3, True)])
    assert data.done


def test_the_source_of_a_lost_worker_continues_at_its_counted_position() -> None:
    data = stream(sources=1)
    numbers = data.take(1, 0, 3, [1])
    data.commit(1, numbers[0])
    assert data.take(2, 0, 1, [2]) == []
    data.lose(1)

    assert data.offset(0) == 4
    assert places(data, data.take(2, 0, 3, [2])) == [(0, 4), (0, 8), (0, 12)]


def test_a_worker_lost_between_two_batches_frees_its_source() -> None:
    data = stream(sources=1)
    data.commit(1, *data.take(1, 0, 1, [1]))
    assert data.take(2, 0, 1, [2]) == []
    data.lose(1)

    assert places(data, data.take(2, 0, 1, [2])) == [(0, 4)]


def test_a_worker_that_moved_to_the_next_loop_frees_its_source() -> None:
    ledger = DataLedger()
    spec = StreamSpec(0, sources=1, batch_size=4)
    data = ledger.open(1, spec)
    ledger.commit(1, [BatchKey(0, *data.take(1, 0, 1, [1]), 4)])
    ledger.open(1, StreamSpec(1, sources=1, batch_size=4))

    number = ledger.open(2, spec).take(2, 0, 1, [1, 2])
    assert [spec.offset(n) for n in number] == [4]


def test_a_restored_stream_begins_each_source_at_its_counted_position() -> None:
    ledger, restored = DataLedger(), DataLedger()
    data = ledger.open(1, StreamSpec(0, sources=2, batch_size=4))
    numbers = data.take(1, 0, 3, [1])
    ledger.commit(1, [BatchKey(0, numbers[0], 4), BatchKey(0, numbers[2], 4)])
    restored.restore(json.loads(json.dumps(ledger.state())))
    again = restored.loops[0]

    assert (len(again.leases), again.committed) == (0, 2)
    assert [again.spec.offset(n) for n in again.take(7, 0, 3, [7])] == [4, 12, 16]  # type: ignore[union-attr]


class StreamJob:
    """A job over a stream whose workers read, push, return, die and are replaced; a second ledger
    answers identically. samples: how often each (epoch, source, sample) has counted.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.spec = StreamSpec(
            0, self.rng.randint(1, 4), self.rng.randint(1, 4), self.rng.randint(1, 2)
        )
        self.lengths = [self.rng.randint(0, 9) for _ in range(self.spec.sources)]
        self.barrier = self.rng.random() < 0.5
        self.ledgers = [DataLedger()]
        self.workers = list(range(1, self.rng.randint(1, 4) + 1))
        self.last = self.workers[-1]
        self.received: dict[int, int] = {}
        self.hand: dict[int, list[BatchKey]] = {}
        self.samples: dict[tuple[int, int, int], int] = {}

    @property
    def done(self) -> bool:
        loop = self.ledgers[0].loops.get(0)
        return loop is not None and loop.done

    def step(self) -> None:
        act = self.rng.choices(
            [self.read, self.push, self.put_back, self.die, self.replace], [6, 5, 0.7, 0.3, 0.3]
        )[0]
        act(self.rng.choice(self.workers))

    def read(self, worker: int) -> None:
        received, count = self.received.get(worker, 0), self.rng.randint(1, 3)
        together = self.workers if self.barrier else [worker]
        answers = [
            ledger.open(worker, self.spec).take(worker, received, count, together)
            for ledger in self.ledgers
        ]
        assert all(answer == answers[0] for answer in answers)
        self.received[worker] = received + len(answers[0])
        for number in answers[0]:
            key = self.found(number)
            if key.count:
                self.hand.setdefault(worker, []).append(key)
            else:
                self.each("put_back", worker, [key])

    def found(self, number: int) -> BatchKey:
        """Return what this batch contains; the reader looks one sample ahead, so it knows
        the end.
        """
        left = self.lengths[self.spec.source(number)] - self.spec.offset(number)
        return BatchKey(
            0, number, max(0, min(left, self.spec.batch_size)), left <= self.spec.batch_size
        )

    def each(self, name: str, *args: object) -> None:
        for ledger in self.ledgers:
            getattr(ledger, name)(*args)

    def push(self, worker: int) -> None:
        hand = self.hand.get(worker, [])
        count = self.rng.randint(0, len(hand))
        keys, self.hand[worker] = hand[:count], hand[count:]
        self.each("commit", worker, keys)
        for key in keys:
            start = self.spec.offset(key.number)
            for sample in range(start, start + key.count):
                place = self.spec.epoch(key.number), self.spec.source(key.number), sample
                self.samples[place] = self.samples.get(place, 0) + 1

    def put_back(self, worker: int) -> None:
        hand = self.hand.get(worker, [])
        keys = self.rng.sample(hand, self.rng.randint(0, len(hand)))
        self.hand[worker] = [key for key in hand if key not in keys]
        self.each("put_back", worker, keys)

    def die(self, worker: int) -> None:
        self.last += 1
        self.workers[self.workers.index(worker)] = self.last
        self.hand.pop(worker, None)
        self.each("give_back", worker)

    def replace(self, worker: int) -> None:
        self.each("transfer", worker, self.last + 1)
        self.die(worker)

    def recover(self) -> None:
        twin = DataLedger()
        twin.recover(json.loads(json.dumps(self.ledgers[0].state())))
        self.ledgers.append(twin)


@pytest.mark.full
def test_every_sample_of_every_source_counts_once_after_any_loss() -> None:
    """1500 random jobs, in sync and without a barrier, with a recovered ledger that must agree."""
    for seed in range(1500):
        job = StreamJob(seed)
        for _ in range(job.rng.randint(0, 20)):
            job.step()
        job.recover()
        steps = 0
        while not job.done:
            job.step()
            steps += 1
            assert steps < 5000, seed
        every = {
            (e, s, n)
            for e in range(job.spec.epochs)
            for s, size in enumerate(job.lengths)
            for n in range(size)
        }

        assert job.samples == dict.fromkeys(every, 1), seed
        assert job.ledgers[0].state() == job.ledgers[1].state()
        assert job.ledgers[0].loops[0].duplicates == 0
