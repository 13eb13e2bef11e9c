"""Contenders taking turns, round by round."""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks import processes
from benchmarks.record import Record
from benchmarks.speaker import Command, Measurements, Speaker

Show = Callable[[str], None]

MAX_CONCURRENT_STARTS = 2
"""Contenders that start at a time: dozens of starting processes would starve each other until
leases end.
"""

SETTLE_SECONDS = 0.05
"""After a turn: what a contender does once it has answered is its own cost, and must not be the
next one's.
"""


@dataclass(frozen=True)
class Entry:
    """A row of the result. Entries with equal commands share a process, unless `own` gives one
    an own name for it.

    spins: it uses a core while it has nothing to do, so it is stopped while others take their
    turns.
    """

    name: str
    command: Command
    word: str = "go"
    own: str = ""
    spins: bool = False

    @property
    def process(self) -> tuple[Command, str]:
        return self.command, self.own


class Contest:
    """All contenders of a work, warm, for as long as a `with` lasts."""

    def __init__(self, entries: Sequence[Entry], resources: ExitStack) -> None:
        self._entries = entries
        wanted = dict.fromkeys(entry.process for entry in entries)
        self._speakers: dict[tuple[Command, str], Speaker] = {}
        warming: deque[Speaker] = deque()
        for process in wanted:
            if len(warming) == MAX_CONCURRENT_STARTS:
                warming.popleft().wait_until_ready()
            self._speakers[process] = resources.enter_context(Speaker(process[0]))
            warming.append(self._speakers[process])
        for speaker in warming:
            speaker.wait_until_ready()
        for entry in entries:
            if entry.spins:
                self._speakers[entry.process].freeze()

    def run(self, rounds: int, show: Show) -> dict[str, Record]:
        """Run every entry once per round, in a different order each round."""
        records: dict[str, Record] = {entry.name: {} for entry in self._entries}
        for number in range(rounds):
            show(f"round {number + 1} of {rounds}")
            for entry in random.Random(number).sample(self._entries, len(self._entries)):
                for metric, value in self._turn(entry).items():
                    records[entry.name].setdefault(metric, []).append(value)
        return records

    def _turn(self, entry: Entry) -> Measurements:
        speaker = self._speakers[entry.process]
        speaker.thaw()
        measured = measure(speaker, entry.word)
        if entry.spins:
            speaker.freeze()
        return measured


def measure(speaker: Speaker, word: str) -> Measurements:
    """One turn, with what its processes used for it, each a piece: "cpu" seconds and "loopback"
    bytes.
    """
    members = processes.family(speaker.pid)
    cpu, sent = processes.cpu_seconds(members), processes.loopback_bytes(speaker.pid)
    measured = speaker.ask(word)
    time.sleep(SETTLE_SECONDS)
    count = measured.pop("count", 1)
    measured["cpu"] = (processes.cpu_seconds(members) - cpu) / count
    measured["loopback"] = (processes.loopback_bytes(speaker.pid) - sent) / count
    return measured
