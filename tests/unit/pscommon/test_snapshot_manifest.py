"""A manifest survives encoding; an invalid one is refused even with a correct checksum."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from pscommon.core.errors import SnapshotError
from pscommon.snapshot import Manifest, SnapshotPart
from tests.support.snapshot_cases import MIXED, manifest_of

DIGEST = "0123456789abcdef" * 4
PARTS = tuple(
    SnapshotPart(f"shard-{shard}-of-2-0123456789abcdef.safetensors", 100 + shard, DIGEST)
    for shard in range(2)
)


def manifest() -> Manifest:
    return manifest_of(7, MIXED, PARTS)


def forged(change: Callable[[dict[str, Any]], object]) -> str:
    """Return a manifest with a change and a recomputed checksum."""
    body = json.loads(manifest().as_json())
    change(body)
    body["sha256"] = ""
    digest = hashlib.sha256((json.dumps(body, indent=1) + "\n").encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1) + "\n"


def test_a_manifest_is_read_as_it_was_written() -> None:
    assert Manifest.from_json(manifest().as_json()) == manifest()


def test_the_checksum_follows_the_format() -> None:
    assert forged(lambda body: None) == manifest().as_json()


def test_the_text_is_ascii_for_any_names() -> None:
    strange = dataclasses.replace(
        manifest(), job="größe \ud800", coordinator={"loss": float("nan")}
    )

    assert strange.as_json().isascii()
    assert Manifest.from_json(strange.as_json()).job == strange.job


def test_nbytes_counts_all_parts() -> None:
    assert manifest().nbytes == 201


@pytest.mark.parametrize(
    "name",
    [
        "../../../etc/passwd",
        "/etc/passwd",
        "..",
        "",
        "shard-0-of-2-0123456789abcdef.safetensors/../x",
        "x/shard-0-of-2-0123456789abcdef.safetensors",
        "shard-0-of-2-0123456789abcdef.safetensors\n",
        "shard-0-of-2-0123456789abcdef.safetensors\x00",
        "shard-٠-of-2-0123456789abcdef.safetensors",
        "shard-00-of-2-0123456789abcdef.safetensors",
        "shard-1-of-2-0123456789abcdef.safetensors",
        "shard-0-of-3-0123456789abcdef.safetensors",
        "shard-0-of-2-fedcba9876543210.safetensors",
        "MANIFEST.json",
    ],
)
def test_a_part_with_a_foreign_name_is_refused(name: str) -> None:
    def change(body: dict[str, Any]) -> None:
        body["parts"][0]["file"] = name

    with pytest.raises(SnapshotError, match="has the name"):
        Manifest.from_json(forged(change))


def setting(*path: str | int, to: object) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        inner: Any = body
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = to

    return change


@pytest.mark.parametrize(
    "change",
    [
        setting("format", to=2),
        setting("format", to=None),
        setting("version", to=-1),
        setting("version", to="7"),
        setting("version", to=True),
        setting("version", to=7.0),
        setting("index", to=-1),
        setting("shards", to=0),
        setting("shards", to=3),
        setting("parts", to=[]),
        setting("parts", to=["x"]),
        setting("parts", 0, to=None),
        setting("parts", 0, "nbytes", to=-1),
        setting("parts", 0, "sha256", to="x" * 64),
        setting("parts", 0, "sha256", to=0),
        setting("elsewhere", to=["../x"]),
        setting("elsewhere", to=[[]]),
        setting("elsewhere", to="x"),
        setting("job", to=None),
        setting("model", to=[]),
        setting("model", "tensors", to=[]),
        setting("model", "tensors", 0, to=3),
        setting("model", "tensors", 0, "name", to="head.weight"),
        setting("model", "tensors", 0, "shape", to=[-1]),
        setting("model", "tensors", 0, "shape", to=["5"]),
        setting("model", "tensors", 0, "dtype", to="object"),
        setting("model", "tensors", 0, "role", to="admin"),
        setting("model", "tensors", 0, "group", to=9),
        setting("model", "optimizer", to=None),
        setting("model", "optimizer", "groups", to=["x", "y"]),
        setting("coordinator", to=[]),
        lambda body: body.pop("created"),
        lambda body: body["model"].pop("optimizer"),
    ],
)
def test_a_malformed_manifest_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(SnapshotError):
        Manifest.from_json(forged(change))


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", "{", '"x"', "[" * 100_000, '{"sha256": ' * 900, "\ud800", "é"]
)
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(SnapshotError, match="damaged"):
        Manifest.from_json(text)


def test_a_checksum_that_is_not_the_first_field_is_refused() -> None:
    body = json.loads(manifest().as_json())
    moved = {key: body[key] for key in [*list(body)[1:], "sha256"]}

    with pytest.raises(SnapshotError, match="checksum"):
        Manifest.from_json(json.dumps(moved, indent=1) + "\n")


def test_an_inconsistent_manifest_cannot_be_created() -> None:
    with pytest.raises(SnapshotError, match="1 parts for 2 shards"):
        dataclasses.replace(manifest(), parts=PARTS[:1])
