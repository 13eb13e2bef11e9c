"""Staged pushes that are not decided; a push is ready once every shard staged it."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pscommon.core.log_entries import BatchKey, Contribution, PushKey, Staged
from psserver.core.job.clipping import Measurement
from psserver.core.job.ready_pushes import ReadyPushes


class PendingPushes:
    """Reports of staged pushes by worker, sequence number and shard.

    A worker has one push in flight. When it sends the next one, it has given up the earlier ones.

    ready: pushes that every shard has staged, in order of arrival.
    measurement: the last measurement of these pushes that the shards were asked for; None once an
        update has counted.
    measured: measurements before it that are complete: a round of several optimizers has one each.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._reports: dict[int, dict[int, dict[int, Staged]]] = {}
        self._several: set[int] = set()  # workers with several pushes
        self.ready = ReadyPushes()
        self.measurement: Measurement | None = None
        self.measured: list[Measurement] = []

    def clear(self, shards: int) -> None:
        """Drop all pushes; later ones are of this number of shards."""
        self._shards = shards
        self._reports.clear()
        self._several.clear()
        for key in list(self.ready):
            self.ready.discard(key)
        self.forget_measurements()

    def forget_measurements(self) -> None:
        self.measurement = None
        self.measured.clear()

    def measure(self, measurement: Measurement) -> None:
        """Record that the shards are asked for another measurement."""
        if self.measurement is not None and self.measurement.square_norm(self._shards) is not None:
            self.measured.append(self.measurement)
        self.measurement = measurement

    def measurement_of(self, contributions: tuple[Contribution, ...]) -> Measurement | None:
        """Return the measurement of exactly these contributions; None without a usable one."""
        all_of_them = [*self.measured, self.measurement] if self.measurement else self.measured
        return next((each for each in all_of_them if each.contributions == contributions), None)

    def holds(self, shard: int, key: PushKey) -> bool:
        """Return whether this shard has reported the push."""
        pushes = self._reports.get(key.worker)
        return pushes is not None and shard in pushes.get(key.seq, ())

    def staged(self, shard: int, staged: Staged) -> bool:
        """Record that a shard has staged a push. Return whether the push is ready."""
        key = staged.key
        pushes = self._reports.get(key.worker)
        if pushes is None:
            pushes = self._reports[key.worker] = {}
        reports = pushes.get(key.seq)
        if reports is None:
            reports = pushes[key.seq] = {}
            if len(pushes) > 1:
                self._several.add(key.worker)
        reports[shard] = staged
        if len(reports) < self._shards:
            return False
        if key not in self.ready:
            self.ready.add(key, reports[min(reports)])
        return True

    def has_several(self, worker: int) -> bool:
        """Return whether a worker has sent a push while an earlier one was not decided."""
        return worker in self._several

    def given_up(self) -> list[PushKey]:
        """Return pushes that some shard lacks and whose worker has sent a later push.

        They may never become ready.
        """
        if not self._several:
            return []
        return [
            key
            for worker, pushes in self._reports.items()
            if worker in self._several
            for seq in sorted(pushes)[:-1]
            if (key := PushKey(worker, seq)) not in self.ready
        ]

    def norm(self, key: PushKey) -> float:
        """Return the L2 norm of the whole gradient."""
        return math.sqrt(self.square_norm(key))

    def square_norm(self, key: PushKey) -> float:
        """Return the sum of squares of the whole gradient, as reported by the shards."""
        reports = self._reports[key.worker][key.seq]
        return sum(reports[shard].square_norm for shard in sorted(reports))

    def is_measured(self, key: PushKey) -> bool:
        """Return whether each shard reported a sum of squares.

        A shard that was not yet asked to compute norms reports 0.
        """
        return all(staged.square_norm > 0 for staged in self._reports[key.worker][key.seq].values())

    def forget(self, key: PushKey) -> None:
        """Remove a decided push, and the earlier ones that its worker has given up."""
        pushes = self._reports.pop(key.worker, {})
        for seq in [seq for seq in pushes if seq <= key.seq]:
            del pushes[seq]
            self.ready.discard(PushKey(key.worker, seq))
        if pushes:
            self._reports[key.worker] = pushes
        if len(pushes) < 2:
            self._several.discard(key.worker)

    def drop(self, worker: int) -> None:
        """Remove all pushes of a worker that is no longer a member."""
        self._several.discard(worker)
        for seq in self._reports.pop(worker, {}):
            self.ready.discard(PushKey(worker, seq))

    def shard_lost(self, shard: int) -> None:
        """Remove the reports of a shard that was restarted: it has nothing staged."""
        for worker, pushes in list(self._reports.items()):
            for seq, reports in list(pushes.items()):
                if reports.pop(shard, None) is not None:
                    self.ready.discard(PushKey(worker, seq))
                if not reports:  # `state` cannot express such a push
                    del pushes[seq]
            if not pushes:
                del self._reports[worker]
            if len(pushes) < 2:
                self._several.discard(worker)

    def state(self) -> dict[str, Any]:
        """Return the state, JSON-ready; `recover` is the inverse."""
        parts = (reports for pushes in self._reports.values() for reports in pushes.values())
        entries = [[shard, _to_json(staged)] for part in parts for shard, staged in part.items()]
        measurement = {} if self.measurement is None else {"measurement": self.measurement.state()}
        measured = {"measured": [each.state() for each in self.measured]} if self.measured else {}
        ready = [list(key) for key in self.ready]
        return {"held": entries, "ready": ready, **measurement, **measured}

    def recover(self, state: Mapping[str, Any]) -> None:
        for shard, staged in state["held"]:
            self.staged(shard, _from_json(staged))
        self.ready.replace(map(_key, state["ready"]))
        self.measurement = (
            Measurement.from_state(state["measurement"]) if "measurement" in state else None
        )
        self.measured = [Measurement.from_state(each) for each in state.get("measured", ())]


def _key(pair: Iterable[int]) -> PushKey:
    return PushKey(*pair)


def _to_json(staged: Staged) -> list[Any]:
    batches = [list(batch) for batch in staged.batches]
    return [
        *staged.key,
        staged.samples,
        staged.base,
        batches,
        staged.problem,
        staged.square_norm,
        staged.mended,
        *([staged.optimizer] if staged.optimizer else []),
    ]


def _from_json(values: list[Any]) -> Staged:
    worker, seq, samples, base, batches, *rest = values
    keys = tuple(BatchKey(*batch) for batch in batches)
    return Staged(PushKey(worker, seq), samples, base, keys, *rest)


def staged_to_json(staged: Iterable[Staged]) -> list[Any]:
    """Return a report's pushes, JSON-ready; `staged_from_json` is the inverse."""
    return [_to_json(each) for each in staged]


def staged_from_json(values: Iterable[list[Any]]) -> Iterator[Staged]:
    """Yield the pushes from the result of `staged_to_json`."""
    return (_from_json(each) for each in values)
