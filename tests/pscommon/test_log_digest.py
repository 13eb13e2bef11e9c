"""The digest of the job's log: shards and coordinators of all releases compute the same bytes."""

from pscommon.core.log import Apply, Begin, Contribution, Cut, Entry, Evict, PushKey, Reject, Reshard, chained

LOG: tuple[tuple[Entry, int], ...] = (
    (Begin(1, 1), 0x03D1290E7C84A577),
    (Apply(2, 1, (Contribution(PushKey(1, 1), 32, 0),)), 0x7410679B6DF4BE12),
    (Apply(3, 2, (Contribution(PushKey(1, 2), 32, 1), Contribution(PushKey(2, 1), 7, 0, 0.25))), 0x9000C3F4B005373B),
    (Apply(4, 3, (Contribution(PushKey(10001, 12), 1, 2, 1 / 3),)), 0x8AFCDB8BF3DF65F7),
    (Apply(5, 4, ()), 0x23E08D1514A1E259),
    (Reject(6, PushKey(2, 2), "NON_FINITE", "worker 2: NaN or Inf in the gradient of 'a\"b'"), 0x5C5A8B705DDF791E),
    (Reject(7, PushKey(2, 3), "STALE", "computed from version 1, 3 ago"), 0xE6E7A397D534DDE1),
    (Evict(8, 2, "it left the job"), 0xF6D71715093A3182),
    (Evict(9, 3, "nothing heard from it for 5.0 s; its lease ended – é"), 0xAA1C56CE49408056),
    (Cut(10, 4), 0x38F10A1E2F147BCA),
    (Reshard(11, 4, 3), 0x169766B954CD3CB0),
    (Apply(12, 5, (Contribution(PushKey(1, 3), 2**40, 4, 1e-300),)), 0x3B59EC8C73E77F18),
)
"""Entries of every type, each with the digest of the log up to it."""


def test_the_digest_of_a_log_has_the_bytes_of_release_9f5f539() -> None:
    digest, found = 0, []
    for entry, _ in LOG:
        digest = chained(digest, entry)
        found.append(digest)

    assert found == [expected for _, expected in LOG]


def test_the_table_has_every_type_of_entry_of_that_release() -> None:
    assert {type(entry) for entry, _ in LOG} >= {Begin, Apply, Reject, Evict, Cut, Reshard}
