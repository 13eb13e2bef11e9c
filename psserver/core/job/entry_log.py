"""The job's log as the coordinator keeps it: numbered entries, as long as some shard may still
need them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from pscommon.core.entry_encoding import chained, entry_from_json, entry_to_json
from pscommon.core.log_entries import Apply, Begin, Entry, Measure, PushKey, ShardReport


class EntryLog:
    """index: of the newest entry; base: entries up to it are not kept, because every shard has
    carried them out.

    digest: of all entries.
    """

    def __init__(self, shards: int) -> None:
        self.index = 0
        self.digest = 0
        self._entries: dict[int, Entry] = {}
        self._digests = {0: 0}  # from the base on
        self._reached = dict.fromkeys(range(shards), 0)

    @property
    def base(self) -> int:
        return next(iter(self._entries), self.index + 1) - 1

    @property
    def next(self) -> int:
        """Number of the entry that comes next."""
        return self.index + 1

    def members(self, shards: int, index: int) -> None:
        """So many shards follow from now on; those that are new begin after `index`."""
        self._reached = {shard: self._reached.get(shard, index) for shard in range(shards)}

    def append(self, entry: Entry) -> None:
        self.index, self.digest = entry.index, chained(self.digest, entry)
        self._entries[self.index], self._digests[self.index] = entry, self.digest

    def after(self, index: int) -> list[Entry]:
        """What a shard that is at `index` needs."""
        if index >= self.index:
            return []
        return [self._entries[i] for i in range(index + 1, self.index + 1) if i in self._entries]

    def reached(self, shard: int, index: int) -> None:
        """A shard has carried out everything up to here."""
        if shard not in self._reached:
            return  # it has left
        self._reached[shard] = max(self._reached[shard], index)
        for carried_out in range(self.base + 1, min(self._reached.values()) + 1):
            self._entries.pop(carried_out, None)
            self._digests.pop(carried_out - 1, None)

    def back(self, shard: int) -> None:
        """The shard may have carried out less than it said: it may need all that is kept here."""
        if shard in self._reached:
            self._reached[shard] = self.base

    def told(self, shard: int) -> int:
        """How far the shard has said that it is."""
        return self._reached[shard]

    def can_go_on(self, report: ShardReport) -> bool:
        """Has the shard carried out what stands here and no other, and does it hold the pushes
        that the rest counts?

        A shard whose log could not be written does not, once it was started again. For the first
        report of a line.
        """
        staged = {each.key for each in report.staged}
        return (
            self._digests.get(report.index) == report.digest
            and counted(self.after(report.index)) <= staged
        )

    def start(self, index: int, digest: int = 0) -> None:
        """All shards stand here: entries begin after it."""
        self.index, self.digest = index, digest
        self._entries.clear()
        self._digests = {index: digest}
        self._reached = dict.fromkeys(self._reached, index)

    def state(self) -> dict[str, Any]:
        """All of it, JSON-ready; `recover` is the way back."""
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
        self._reached = dict(state["reached"])


def counted(entries: Iterable[Entry]) -> set[PushKey]:
    """The pushes without which these entries cannot be carried out."""
    keys: set[PushKey] = set()
    for entry in entries:
        match entry:
            case Begin():
                keys.add(PushKey(entry.worker, 0))
            case Apply() | Measure():
                keys.update(contribution.key for contribution in entry.contributions)
    return keys
