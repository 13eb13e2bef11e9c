"""Log entries as text for the digest, and as JSON in the coordinator's state.

Both are formats: shards, standbys and logs on disk of different releases compare the digest. So
each entry is encoded here field by field, independently of class and attribute names.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from pscommon.core.log_entries import (
    Apply,
    Begin,
    Contribution,
    Cut,
    Entry,
    Evict,
    Measure,
    PushKey,
    Reject,
    Reshard,
    SetBuffers,
)


@lru_cache(16)  # on shard 0 the coordinator and the shard ask for the same ones
def chained(digest: int, entry: Entry) -> int:
    """Return the digest (64 bits) of a log with one more entry; 0 is the digest of an empty log."""
    return int.from_bytes(
        blake2b(f"{digest} {encoded(entry)}".encode("ascii"), digest_size=8).digest()
    )


def encoded(entry: Entry) -> str:
    """Return the text of an entry that enters the digest: ASCII, NAME(FIELD=VALUE, ...).

    Integers are decimal. A float is the shortest text that reads back as the same float. Strings
    are Python literals in ASCII. A tuple of one element ends with a comma.
    """
    match entry:
        case Begin():
            return f"Begin(index={entry.index:d}, worker={entry.worker:d})"
        case Apply():
            contributions = _contributions(entry.contributions)
            numbers = f"index={entry.index:d}, version={entry.version:d}"
            return f"Apply({numbers}, contributions={contributions})"
        case Measure():
            contributions = _contributions(entry.contributions)
            return f"Measure(index={entry.index:d}, contributions={contributions})"
        case SetBuffers():
            return f"SetBuffers(index={entry.index:d}, key={_key(entry.key)})"
        case Reject():
            cause = f"reason={entry.reason!a}, detail={entry.detail!a}"
            return f"Reject(index={entry.index:d}, key={_key(entry.key)}, {cause})"
        case Evict():
            return f"Evict(index={entry.index:d}, worker={entry.worker:d}, reason={entry.reason!a})"
        case Cut():
            return f"Cut(index={entry.index:d}, version={entry.version:d})"
        case Reshard():
            numbers = f"index={entry.index:d}, version={entry.version:d}"
            return f"Reshard({numbers}, shards={entry.shards:d})"


def _key(key: PushKey) -> str:
    return f"PushKey(worker={key.worker:d}, seq={key.seq:d})"


def _contributions(contributions: Sequence[Contribution]) -> str:
    texts = [
        f"Contribution(key={_key(part.key)}, samples={part.samples:d}, base={part.base:d}, "
        f"scale={part.scale!r})"
        for part in contributions
    ]
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def entry_to_json(entry: Entry) -> list[Any]:
    """Return the entry's class name and values, JSON-ready; `entry_from_json` is the inverse."""
    match entry:
        case Begin():
            return ["Begin", entry.index, entry.worker]
        case Apply():
            return ["Apply", entry.index, entry.version, contributions_to_json(entry.contributions)]
        case Measure():
            return ["Measure", entry.index, contributions_to_json(entry.contributions)]
        case SetBuffers():
            return ["SetBuffers", entry.index, [entry.key.worker, entry.key.seq]]
        case Reject():
            return [
                "Reject",
                entry.index,
                [entry.key.worker, entry.key.seq],
                entry.reason,
                entry.detail,
            ]
        case Evict():
            return ["Evict", entry.index, entry.worker, entry.reason]
        case Cut():
            return ["Cut", entry.index, entry.version]
        case Reshard():
            return ["Reshard", entry.index, entry.version, entry.shards]


def entry_from_json(raw: Sequence[Any]) -> Entry:
    """Return the entry from the result of `entry_to_json`.

    Raises:
        ValueError: This release does not know the class.
    """
    match raw:
        case ["Begin", index, worker]:
            return Begin(index, worker)
        case ["Apply", index, version, contributions]:
            return Apply(index, version, contributions_from_json(contributions))
        case ["Measure", index, contributions]:
            return Measure(index, contributions_from_json(contributions))
        case ["SetBuffers", index, [worker, seq]]:
            return SetBuffers(index, PushKey(worker, seq))
        case ["Reject", index, [worker, seq], reason, detail]:
            return Reject(index, PushKey(worker, seq), reason, detail)
        case ["Evict", index, worker, reason]:
            return Evict(index, worker, reason)
        case ["Cut", index, version]:
            return Cut(index, version)
        case ["Reshard", index, version, shards]:
            return Reshard(index, version, shards)
    raise ValueError(f"this release does not know the log entry {raw!r}")


def contributions_to_json(contributions: Iterable[Contribution]) -> list[list[Any]]:
    """Return the contributions, JSON-ready; `contributions_from_json` is the inverse."""
    return [
        [[part.key.worker, part.key.seq], part.samples, part.base, part.scale]
        for part in contributions
    ]


def contributions_from_json(raw: Iterable[Sequence[Any]]) -> tuple[Contribution, ...]:
    """Return the contributions from the result of `contributions_to_json`.

    The scale may be missing: older releases did not write it.
    """
    return tuple(
        Contribution(PushKey(worker, seq), *remaining) for (worker, seq), *remaining in raw
    )
