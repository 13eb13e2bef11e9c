"""Types of option values: what their texts mean, and that printed values parse to the same
again.
"""

import pytest
from hypothesis import given
from hypothesis.strategies import floats

from pscommon.settings import options, values
from pscommon.settings.values import ShardIndex, SnapshotEvery, ValueType


def test_values_are_parsed() -> None:
    assert values.shard("1/3") == ShardIndex(1, 3)
    assert str(ShardIndex(1, 3)) == "1/3"
    assert values.snapshot_every("10m") == SnapshotEvery(seconds=600.0)
    assert values.snapshot_every("1.5s") == SnapshotEvery(seconds=1.5)
    assert values.snapshot_every("500steps") == SnapshotEvery(steps=500)
    assert [str(SnapshotEvery(seconds=60.0)), str(SnapshotEvery(steps=5))] == ["60s", "5steps"]
    assert [values.seconds(text) for text in ("5", "5s", "250ms", "2m", "1h", ".5")] == [
        5,
        5,
        0.25,
        120,
        3600,
        0.5,
    ]
    assert [values.resume(text) for text in ("auto", "never", "17")] == ["auto", "never", 17]
    assert values.addresses("a:1, b:2") == "a:1,b:2"
    for where in (
        "[::1]:0",
        "[::]:0",
        "[fe80::1%eth0]:0",
        "[::ffff:10.0.0.1]:0",
        "10.0.0.1:0",
        "my_host-1.example.org:0",
    ):
        assert values.listening(where) == where
    assert values.host_and_port("[::1]:80") == ("[::1]", 80)


TIMES = [
    "5",
    "0.1",
    "250ms",
    "0.00001s",
    "1e-05",
    "3e2",
    "1234567",
    "123456.789012",
    "278h",
    "1000h",
    "0.3m",
    ".7ms",
]
PRINTED: dict[str, list[str]] = {
    "SECONDS": TIMES,
    "60s|10m|500steps": [
        *(text for text in TIMES if text[-1] in "smh"),
        "1steps",
        "9223372036854775807 steps",
    ],
    "shrink|wait:SECONDS|abort": ["shrink", "abort", *(f"wait:{text}" for text in TIMES)],
    "INTEGER": ["1", "2147483647", "0007"],
    "NORM": ["1", "0.1", "1e-300", "1.7976931348623157e308", "123456789.12345679"],
    "BYTES": ["1", "1.5kiB", "0.1GB", "9007199254740993", "9223372TB", "8388607TiB"],
    "TEXT": ["otter", "é", ""],
    "MODULE": ["my_optimizers", "package.module"],
    "I/N": ["0/1", "2147483646/2147483647"],
    "auto|never|VERSION": ["auto", "never", "0", "9223372036854775807"],
    "auto|cpu|cuda[:K]": ["auto", "cpu", "cuda", "cuda:1"],
    "HOST:PORT": ["a:1", "[::1]:65535"],
    "HOST:PORT[,...]": ["a:1", "a:1, b:2"],
    "MIN..MAX": ["2..8", "1..1"],
    "FILE|http://HOST/PATH": ["notice", "http://metadata/preempted"],
    "CPU=N,GPU=N": ["CPU=2,GPU=1", "CPU=0.5"],
}


KINDS = {
    option.type.name: option.type
    for options_of_one in options.TABLES.values()
    for option in options_of_one
    if isinstance(option.type, ValueType)
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_a_printed_value_parses_to_the_same_value(kind: ValueType) -> None:
    for text in PRINTED[kind.name]:
        value = kind.parse(text)
        assert kind.parse(str(value)) == value


@given(floats(1e-9, 3_600_000))
def test_times_are_printed_exactly(seconds: float) -> None:
    for parse, text in (
        (values.seconds, repr(seconds)),
        (values.snapshot_every, f"{seconds!r}s"),
        (values.on_worker_loss, f"wait:{seconds!r}"),
    ):
        assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("500", 500),
        ("500B", 500),
        ("16MB", 16_000_000),
        ("16M", 16_000_000),
        ("2k", 2000),
        ("2GiB", 2 << 30),
        ("2Gi", 2 << 30),
        ("1.5kiB", 1536),
        ("0.5 GB", 500_000_000),
        (".5kB", 500),
        ("1TiB", 1 << 40),
        ("3TB", 3 * 10**12),
    ],
)
def test_sizes_in_bytes_are_parsed(text: str, expected: int) -> None:
    assert values.nbytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "0", "0MB", "0.4", "-1", "MB", "1mb", "1KB", "1.2.3k", "1e9", "2 G B", "half"]
)
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a number of bytes \(500MB, 2GiB\)"):
        values.nbytes(text)
