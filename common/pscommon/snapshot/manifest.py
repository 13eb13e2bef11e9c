"""Manifest of a snapshot: MANIFEST.json and its checks. `SnapshotDirectory.commit` writes it."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pscommon.core.errors import SnapshotError
from pscommon.core.formats import check_file_format
from pscommon.core.model_spec import ModelSpec, model_from_json, model_to_json, typed

FORMAT = 1
MANIFEST = "MANIFEST.json"

_PART_FILE = re.compile(r"shard-(0|[1-9]\d*)-of-([1-9]\d*)-([0-9a-f]{16})\.safetensors", re.ASCII)
_FORMAT = re.compile(rb'"format": ([1-9]\d{0,8})\b')
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


class SnapshotPart(NamedTuple):
    """One shard's part.

    file: name inside the version's folder.
    nbytes: size of the file.
    sha256: SHA-256 of the file, in hex.
    """

    file: str
    nbytes: int
    sha256: str


def part_file(shard: int, shards: int, sha256: str) -> str:
    """Return a name that contains shard and content hash: different parts never share a name."""
    return f"shard-{shard}-of-{shards}-{sha256[:16]}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A snapshot of a whole job.

    job: name of the job.
    version: number of updates.
    index: index in the job's log at this version.
    shards: number of shards.
    created: ISO 8601 with time zone.
    model: the model.
    parts: one for each shard, in the order of shards.
    coordinator: JSON that only the coordinator reads.
    libraries: version by library.
    elsewhere: files of parts that `commit` did not find, because their servers have other disks.
    format: number of the format.

    Raises:
        SnapshotError: The values are not consistent.
    """

    job: str
    version: int
    index: int
    shards: int
    created: str
    model: ModelSpec
    parts: tuple[SnapshotPart, ...]
    coordinator: Mapping[str, Any] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)
    elsewhere: tuple[str, ...] = ()
    format: int = FORMAT

    def __post_init__(self) -> None:
        if min(self.version, self.index) < 0:
            raise SnapshotError(
                f"version {self.version}, index {self.index}: neither can be negative"
            )
        if self.shards < 1 or len(self.parts) != self.shards:
            raise SnapshotError(f"{len(self.parts)} parts for {self.shards} shards")
        for shard, part in enumerate(self.parts):
            _check_part(part, shard, self.shards)
        if unknown := set(self.elsewhere) - {part.file for part in self.parts}:
            raise SnapshotError(f"no part is called {sorted(unknown)}")

    @property
    def nbytes(self) -> int:
        """Size of all parts, in bytes."""
        return sum(part.nbytes for part in self.parts)

    def as_json(self) -> str:
        """Return the text of MANIFEST.json, with its own checksum."""
        body = {
            "format": self.format,
            "job": self.job,
            "version": self.version,
            "index": self.index,
            "shards": self.shards,
            "created": self.created,
            "model": model_to_json(self.model),
            "parts": [
                {"file": part.file, "nbytes": part.nbytes, "sha256": part.sha256}
                for part in self.parts
            ],
            "elsewhere": list(self.elsewhere),
            "coordinator": dict(self.coordinator),
            "libraries": dict(self.libraries),
        }
        return _sealed(body)

    @staticmethod
    def from_json(text: str) -> "Manifest":
        """Return the manifest after checks of every byte and every field.

        Raises:
            SnapshotError: A check failed; the message names it.
            FormatError: A newer release wrote the manifest.
        """
        body = _checked(text)
        check_file_format(body.get("format"), FORMAT, "the manifest")
        if body.get("format") != FORMAT:
            raise SnapshotError(
                f"format {body.get('format')!r}; this version of paramserver reads format {FORMAT}"
            )
        try:
            return _from_body(body)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SnapshotError(f"not a manifest: {error!r}") from error


def format_of_manifest(raw: bytes) -> int | None:
    """Return the format number in the first bytes of a manifest; None without one."""
    found = _FORMAT.search(raw)
    return int(found[1]) if found is not None else None


def _check_part(part: SnapshotPart, shard: int, shards: int) -> None:
    """Check that a server made the name, so that it cannot refer to a file elsewhere."""
    match = _PART_FILE.fullmatch(part.file)
    if match is None or not _SHA256.fullmatch(part.sha256):
        raise SnapshotError(f"part {shard} has the name {part.file!r}, which no server writes")
    if (int(match[1]), int(match[2]), match[3]) != (shard, shards, part.sha256[:16]):
        raise SnapshotError(f"part {shard} of {shards} has the name {part.file!r}")
    if part.nbytes < 0:
        raise SnapshotError(f"part {part.file} has {part.nbytes} bytes")


def _render(checksum: str, body: Mapping[str, Any]) -> str:
    return json.dumps({"sha256": checksum, **body}, indent=1) + "\n"


def _sealed(body: Mapping[str, Any]) -> str:
    """Return the text of these fields, with the checksum of the text without one."""
    return _render(hashlib.sha256(_render("", body).encode("ascii")).hexdigest(), body)


def _checked(text: str) -> dict[str, Any]:
    """Return the manifest's fields, if no byte of the text has changed since it was written.

    The text must equal the encoding of these fields. This detects changes that JSON ignores: a
    space, or a repeated key.
    """
    try:
        body = json.loads(text)
        if not isinstance(body, dict):
            raise SnapshotError("damaged: not a JSON object")
        body.pop("sha256", None)
        is_intact = text == _sealed(body)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"damaged: not JSON: {error}") from error
    if not is_intact:
        raise SnapshotError("damaged: its checksum does not match its content")
    return body


def _from_body(body: Mapping[str, Any]) -> Manifest:
    return Manifest(
        job=typed(body, "job", str),
        version=typed(body, "version", int),
        index=typed(body, "index", int),
        shards=typed(body, "shards", int),
        created=typed(body, "created", str),
        model=model_from_json(typed(body, "model", dict)),
        parts=tuple(
            SnapshotPart(
                typed(part, "file", str), typed(part, "nbytes", int), typed(part, "sha256", str)
            )
            for part in typed(body, "parts", list)
        ),
        elsewhere=tuple(typed(body, "elsewhere", list)),
        coordinator=typed(body, "coordinator", dict),
        libraries=typed(body, "libraries", dict),
    )
