"""The job's log as the coordinator keeps it: numbered entries, as long as some shard may still need them."""

from pscommon.core.log import Entry


class JobLog:
    """index: of the newest entry; base: entries up to it are not kept, because every shard has carried them out."""

    def __init__(self, shards: int) -> None:
        self.index = 0
        self._entries: dict[int, Entry] = {}
        self._reached = dict.fromkeys(range(shards), 0)

    @property
    def base(self) -> int:
        return min(self._entries, default=self.index + 1) - 1

    @property
    def next(self) -> int:
        """Number of the entry that comes next."""
        return self.index + 1

    def append(self, entry: Entry) -> None:
        self.index = entry.index
        self._entries[entry.index] = entry

    def after(self, index: int) -> list[Entry]:
        """What a shard that is at `index` needs."""
        return [self._entries[i] for i in range(index + 1, self.index + 1) if i in self._entries]

    def reached(self, shard: int, index: int) -> None:
        """A shard has carried out everything up to here."""
        self._reached[shard] = max(self._reached[shard], index)
        for carried_out in range(self.base + 1, min(self._reached.values()) + 1):
            self._entries.pop(carried_out, None)

    def start(self, index: int) -> None:
        """All shards stand here: entries begin after it."""
        self.index = index
        self._entries.clear()
        self._reached = dict.fromkeys(self._reached, index)
