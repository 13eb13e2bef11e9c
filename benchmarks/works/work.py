"""What a work is, and how it is run."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime

from benchmarks import machine
from benchmarks.record import Result
from benchmarks.rounds import Contest, Entry, Show
from benchmarks.scale import Scale


@dataclass(frozen=True)
class Lineup:
    """Who takes part; skipped: who does not, and why; facts: for the bars. rounds: 0 for as many
    as the scale says.
    """

    entries: list[Entry]
    skipped: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)
    rounds: int = 0


@dataclass(frozen=True)
class Work:
    """name: of its result. about: one line for people. quick: it is part of a quick run.

    lineup: gets what it may need for as long as the work lasts, and must free it through the stack.
    """

    name: str
    about: str
    lineup: Callable[[Scale, ExitStack], Lineup]
    quick: bool = False

    def run(self, scale: Scale, show: Show) -> Result:
        """Starts all contenders, lets them take turns, ends them. RuntimeError where one fails."""
        when, found = datetime.now(UTC).isoformat(timespec="seconds"), machine.machine()
        with ExitStack() as resources:
            lineup = self.lineup(scale, resources)
            rounds = lineup.rounds or scale.rounds
            show(f"{len(lineup.entries)} contenders warm up")
            records = Contest(lineup.entries, resources).run(rounds, show)
        return Result(
            self.name,
            self.about,
            when,
            rounds,
            found,
            machine.versions(),
            records,
            lineup.skipped,
            lineup.facts,
        )
