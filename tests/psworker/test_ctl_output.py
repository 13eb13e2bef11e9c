"""Numbers as people read them."""

import pytest

from psworker.ctl.output import duration, number, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (None, ""),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (12_345_678, "12.3 MB"),
        (999_600, "1 MB"),
        (5e15, "5e+03 TB"),
    ],
)
def test_size(nbytes: float | None, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0.25, "0.25 s"), (59.94, "59.9 s"), (60, "1 m 0 s"), (200.4, "3 m 20 s"), (7500, "2 h 5 m")],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(None, ""), (12345678, "12345678"), (0.123456, "0.1235"), (128.0, "128")])
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text
