"""Staged pushes that are not decided; a push is ready once every shard staged it."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pscommon.core.log_entries import BatchKey, PushKey, Staged
from psserver.core.job.clipping import Measurement


class PendingPushes:
    """Reports of staged pushes by worker, sequence number and shard.

    A worker has one push in flight. When it sends the next one, it has given up the earlier ones.

    ready: pushes that every shard has staged, in order of arrival.
    measurement: the last measurement of these pushes that the shards were asked for; None once an
        update has counted.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._reports: dict[int, dict[int, dict[int, Staged]]] = {}
        self._ready: dict[PushKey, Staged] = {}
        self.measurement: Measurement | None = None

    def clear(self, shards: int) -> None:
        """Drop all pushes; later ones are of this number of shards."""
        self._shards = shards
        self._reports.clear()
        self._ready.clear()
        self.measurement = None

    @property
    def ready(self) -> Mapping[PushKey, Staged]:
        return self._ready

    @property
    def ready_workers(self) -> set[int]:
        """Workers with an undecided push that all shards have."""
        return {key.worker for key in self._ready}

    def holds(self, shard: int, key: PushKey) -> bool:
        """Return whether this shard has reported the push."""
        return shard in self._reports.get(key.worker, {}).get(key.seq, ())

    def staged(self, shard: int, staged: Staged) -> None:
        """Record that a shard has staged a push."""
        key = staged.key
        reports = self._reports.setdefault(key.worker, {}).setdefault(key.seq, {})
        reports[shard] = staged
        if len(reports) == self._shards:
            self._ready.setdefault(key, reports[min(reports)])

    def given_up(self) -> list[PushKey]:
        """Return pushes that some shard lacks and whose worker has sent a later push.

        They may never become ready.
        """
        return [
            key
            for worker, pushes in self._reports.items()
            if len(pushes) > 1
            for seq in sorted(pushes)[:-1]
            if (key := PushKey(worker, seq)) not in self._ready
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
            self._ready.pop(PushKey(key.worker, seq), None)
        if pushes:
            self._reports[key.worker] = pushes

    def drop(self, worker: int) -> None:
        """Remove all pushes of a worker that is no longer a member."""
        for seq in self._reports.pop(worker, {}):
            self._ready.pop(PushKey(worker, seq), None)

    def shard_lost(self, shard: int) -> None:
        """Remove the reports of a shard that was restarted: it has nothing staged."""
        for worker, pushes in list(self._reports.items()):
            for seq, reports in list(pushes.items()):
                if reports.pop(shard, None) is not None:
                    self._ready.pop(PushKey(worker, seq), None)
                if not reports:  # `state` cannot express such a push
                    del pushes[seq]
            if not pushes:
                del self._reports[worker]

    def state(self) -> dict[str, Any]:
        """Return the state, JSON-ready; `recover` is the inverse."""
        parts = (reports for pushes in self._reports.values() for reports in pushes.values())
        entries = [[shard, _to_json(staged)] for part in parts for shard, staged in part.items()]
        measurement = {} if self.measurement is None else {"measurement": self.measurement.state()}
        return {"held": entries, "ready": [list(key) for key in self._ready], **measurement}

    def recover(self, state: Mapping[str, Any]) -> None:
        for shard, staged in state["held"]:
            self.staged(shard, _from_json(staged))
        self._ready = {key: self._ready[key] for key in map(_key, state["ready"])}
        self.measurement = (
            Measurement.from_state(state["measurement"]) if "measurement" in state else None
        )


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
