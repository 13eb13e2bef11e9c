"""Invented benchmark results."""

from collections.abc import Mapping

from benchmarks.record import Record, Result


def result(
    work: str, records: Mapping[str, Record], **more: Mapping[str, str] | Mapping[str, float]
) -> Result:
    """Return a result with as many rounds as its records have."""
    lengths = {len(values) for record in records.values() for values in record.values()} or {0}
    (rounds,) = lengths
    machine, versions = {"processor": "a processor", "cores": "2"}, {"torch": "2.13.0"}
    return Result(
        work,
        "What was done.",
        "2026-01-02T03:04:05+00:00",
        rounds,
        machine,
        versions,
        records,
        **more,
    )  # type: ignore[arg-type]
