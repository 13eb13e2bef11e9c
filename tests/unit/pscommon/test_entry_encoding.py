"""The digest of the job's log: shards and coordinators of all releases compute the same bytes."""

import json

import pytest

from pscommon.core.entry_encoding import chained, entry_from_json, entry_to_json
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

LOG: tuple[tuple[Entry, int], ...] = (
    (Begin(1, 1), 0x03D1290E7C84A577),
    (Apply(2, 1, (Contribution(PushKey(1, 1), 32, 0),)), 0x7410679B6DF4BE12),
    (
        Apply(3, 2, (Contribution(PushKey(1, 2), 32, 1), Contribution(PushKey(2, 1), 7, 0, 0.25))),
        0x9000C3F4B005373B,
    ),
    (Apply(4, 3, (Contribution(PushKey(10001, 12), 1, 2, 1 / 3),)), 0x8AFCDB8BF3DF65F7),
    (Apply(5, 4, ()), 0x23E08D1514A1E259),
    (
        Reject(6, PushKey(2, 2), "NON_FINITE", "worker 2: NaN or Inf in the gradient of 'a\"b'"),
        0x5C5A8B705DDF791E,
    ),
    (Reject(7, PushKey(2, 3), "STALE", "computed from version 1, 3 ago"), 0xE6E7A397D534DDE1),
    (Evict(8, 2, "it left the job"), 0xF6D71715093A3182),
    (Evict(9, 3, "nothing heard from it for 5.0 s; its lease ended – é"), 0xAA1C56CE49408056),
    (Cut(10, 4), 0x38F10A1E2F147BCA),
    (Reshard(11, 4, 3), 0x169766B954CD3CB0),
    (Apply(12, 5, (Contribution(PushKey(1, 3), 2**40, 4, 1e-300),)), 0x3B59EC8C73E77F18),
    (
        Measure(13, (Contribution(PushKey(1, 4), 8, 5, 0.5), Contribution(PushKey(2, 4), 8, 5))),
        0x5328924C1164BDC9,
    ),
    (Reject(14, PushKey(2, 5), "OUTLIER", "'\"\\\n😀\u2028"), 0xE8CD4D7E42035677),
    (SetBuffers(15, PushKey(1, 5)), 0x6E84F8BB2D9D7E85),
)
"""Entries of every type, each with the digest of the log up to it."""


def test_the_log_digest_has_the_bytes_of_release_9f5f539() -> None:
    digest, found = 0, []
    for entry, _ in LOG:
        digest = chained(digest, entry)
        found.append(digest)

    assert found == [expected for _, expected in LOG]


def test_the_table_has_every_type_of_entry() -> None:
    kinds = {Begin, Apply, Reject, Evict, Cut, Reshard, Measure, SetBuffers}
    assert {type(entry) for entry, _ in LOG} == kinds


IN_STATE = (
    ["Begin", 1, 1],
    ["Apply", 2, 1, [[[1, 1], 32, 0, 1.0], [[2, 1], 7, 0, 0.25]]],
    ["Measure", 3, [[[1, 4], 8, 5, 0.5]]],
    ["Reject", 4, [2, 2], "NON_FINITE", "worker 2: é"],
    ["Evict", 5, 2, "it left the job"],
    ["Cut", 6, 4],
    ["Reshard", 7, 4, 3],
    ["SetBuffers", 8, [1, 5]],
)
"""Entries as they stand in the coordinator's state on disk."""


@pytest.mark.parametrize("raw", IN_STATE, ids=[str(raw[0]) for raw in IN_STATE])
def test_entries_in_the_coordinators_state_have_a_fixed_format(raw: list[object]) -> None:
    assert json.loads(json.dumps(entry_to_json(entry_from_json(raw)))) == raw


def test_a_contribution_without_a_scale_is_not_scaled() -> None:
    assert entry_from_json(["Apply", 2, 1, [[[1, 1], 32, 0]]]) == Apply(
        2, 1, (Contribution(PushKey(1, 1), 32, 0),)
    )


def test_an_entry_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="does not know the log entry"):
        entry_from_json(["Merge", 3, 1])
