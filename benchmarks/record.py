"""What a work's run left: numbers by contender and metric, one a round. Kept as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.sample import Sample, sample

Record = dict[str, list[float]]
"""Of one contender, by metric; every list has one value a round. Seconds, bytes; "cpu" in
seconds of all processes.
"""


@dataclass(frozen=True)
class Result:
    """work: its name. about: what was done, for people. records: by contender. skipped: why, by
    contender.

    facts: what bars need to know besides, such as bytes that are allowed.
    """

    work: str
    about: str
    when: str
    rounds: int
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    records: Mapping[str, Record]
    skipped: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)

    def find(self, contender: str, metric: str) -> Sample | None:
        """None where that was not measured."""
        values = self.records.get(contender, {}).get(metric)
        return sample(values) if values else None

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.work}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")


def load(folder: Path) -> dict[str, Result]:
    """All results in a folder, by work."""
    found = [Result(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    return {result.work: result for result in found}
