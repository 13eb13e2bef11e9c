"""The coordinator's copy of the job's log: entries that some shard may still need."""

from collections.abc import Iterable, Mapping
from typing import Any

from pscommon.core.entry_encoding import chained, entry_from_json, entry_to_json
from pscommon.core.log_entries import Apply, Begin, Entry, Measure, PushKey, SetBuffers, ShardReport


class EntryLog:
    """Numbered log entries, kept until every shard has applied them.

    index: number of the newest entry.
    base: entries up to this number are not kept; every shard has applied them.
    digest: digest of all entries, 64 bits.
    """

    def __init__(self, shards: int) -> None:
        self.index = 0
        self.digest = 0
        self._entries: dict[int, Entry] = {}
        self._digests = {0: 0}  # digest by index, from the base on
        self._set_reached(dict.fromkeys(range(shards), 0))

    def _set_reached(self, reached: dict[int, int]) -> None:
        """Set the last index of each shard, and drop the entries that all of them have applied."""
        self._reached = reached
        indices = list(reached.values())
        self._slowest = min(indices, default=0)
        self._slowest_count = indices.count(self._slowest)
        for applied in range(self.base + 1, self._slowest + 1):
            self._entries.pop(applied, None)
            self._digests.pop(applied - 1, None)

    @property
    def base(self) -> int:
        return next(iter(self._entries), self.index + 1) - 1

    @property
    def next(self) -> int:
        """Number of the next entry."""
        return self.index + 1

    def members(self, shards: int, index: int) -> None:
        """Set the number of shards that follow the log; new ones start after `index`."""
        self._set_reached({shard: self._reached.get(shard, index) for shard in range(shards)})

    def append(self, entry: Entry) -> None:
        self.index, self.digest = entry.index, chained(self.digest, entry)
        self._entries[self.index], self._digests[self.index] = entry, self.digest

    def after(self, index: int) -> list[Entry]:
        """Return the kept entries after `index`."""
        if index >= self.index:
            return []
        return [self._entries[i] for i in range(index + 1, self.index + 1) if i in self._entries]

    def reached(self, shard: int, index: int) -> None:
        """Record that a shard has applied all entries up to `index`."""
        before = self._reached.get(shard)
        if before is None or index <= before:
            return  # None: a reshard has removed it
        self._reached[shard] = index
        self._slowest_count -= before == self._slowest
        if not self._slowest_count:
            self._set_reached(self._reached)

    def back(self, shard: int) -> None:
        """Assume that a restarted shard may need every kept entry, whatever it reported before."""
        if shard in self._reached:
            self._set_reached({**self._reached, shard: self.base})

    def can_go_on(self, report: ShardReport) -> bool:
        """Return whether the shard can follow from the state in its first report.

        It must have applied the same entries as this log, and stage every push that later entries
        count. After a failed log write, a restarted shard does not.
        """
        staged = {each.key for each in report.staged}
        return (
            self._digests.get(report.index) == report.digest
            and counted(self.after(report.index)) <= staged
        )

    def start(self, index: int, digest: int = 0) -> None:
        """Start the log after `index`, which all shards have reached."""
        self.index, self.digest = index, digest
        self._entries.clear()
        self._digests = {index: digest}
        self._set_reached(dict.fromkeys(self._reached, index))

    def state(self) -> dict[str, Any]:
        """Return the state, JSON-ready; `recover` is the inverse."""
        entries = [entry_to_json(entry) for entry in self.after(self.base)]
        digest = self._digests.get(self.base, self.digest)
        return {
            "base": self.base,
            "digest": digest,
            "entries": entries,
            "reached": [*self._reached.items()],
        }

    def recover(self, state: Mapping[str, Any]) -> None:
        self.start(state["base"], state["digest"])
        for entry in state["entries"]:
            self.append(entry_from_json(entry))
        self._set_reached(dict(state["reached"]))


def counted(entries: Iterable[Entry]) -> set[PushKey]:
    """Return the pushes that a shard needs to apply these entries."""
    keys: set[PushKey] = set()
    for entry in entries:
        match entry:
            case Begin():
                keys.add(PushKey(entry.worker, 0))
            case Apply() | Measure():
                keys.update(contribution.key for contribution in entry.contributions)
            case SetBuffers():
                keys.add(entry.key)
    return keys
