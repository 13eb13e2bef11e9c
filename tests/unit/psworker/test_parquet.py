"""Rows of Parquet files: sources, offsets, columns, and what is refused."""

from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psworker import InvalidRequestError
from psworker.data.parquet import BATCH_ROWS_COUNT, Parquet

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: make test-spark")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files with three row groups, the first one longer than a decoded batch."""
    for name, begin, count in (("a", 0, 2500), ("b", 2500, 100)):
        ids = np.arange(begin, begin + count)
        lists = pa.array([[i, 1.0] for i in ids])
        table = pa.table({"id": ids, "pair": lists, "text": [str(i) for i in ids]})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=2000)
    (tmp_path / "_SUCCESS").touch()
    return tmp_path


def test_each_row_group_is_a_source(folder: Path) -> None:
    rows = Parquet(str(folder))

    assert (rows.sources, rows.columns) == (3, ["id", "pair", "text"])
    found = [row[0] for source in range(3) for row in rows.read(source, 0)]
    assert found == list(range(2600))
    one = next(rows.read(1, 0))
    assert one[0] == 2000
    assert one[1].tolist() == [2000.0, 1.0]
    assert one[2] == "2000"


@pytest.mark.parametrize("offset", [0, 1, BATCH_ROWS_COUNT - 1, BATCH_ROWS_COUNT, 1999, 2000, 5000])
def test_rows_are_skipped(folder: Path, offset: int) -> None:
    found = [row[0] for row in Parquet(folder.as_uri(), ["id"]).read(0, offset)]

    assert found == list(range(offset, 2000))


def test_columns_have_the_given_order(folder: Path) -> None:
    assert next(Parquet(str(folder), ["text", "id"]).read(2, 3)) == ("2503", 2503)


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"no column label.*some of id, pair, text"):
        Parquet(str(folder), ["id", "label"])
    (tmp_path / "bare").mkdir()
    with pytest.raises(InvalidRequestError, match="no rows in Parquet files"):
        Parquet(str(tmp_path / "bare"))
    with pytest.raises(InvalidRequestError, match="cannot read"):
        Parquet(str(tmp_path / "nothing"))


def test_decimals_are_numbers(tmp_path: Path) -> None:
    half = Decimal("0.5")
    kinds = [("a", pa.decimal128(3, 1)), ("b", pa.list_(pa.decimal128(3, 1)))]
    table = pa.table({"a": [half], "b": [[half, half]]}, schema=pa.schema(kinds))
    pq.write_table(table, tmp_path / "a.parquet")

    ((number, numbers),) = Parquet(str(tmp_path)).read(0, 0)

    assert (number, numbers.tolist()) == (0.5, [0.5, 0.5])
    assert number.dtype == numbers.dtype == np.float64


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([1.0, None], "has empty values"),
        ([[1.0], [None]], "has empty values"),
        ([{"x": 1}, {"x": 2}], "is a struct"),
        ([datetime(2026, 1, 1)], "is a timestamp"),
        ([["a"]], "is a list"),
    ],
)
def test_what_is_no_number_is_refused(tmp_path: Path, values: list[Any], problem: str) -> None:
    pq.write_table(pa.table({"a": values}), tmp_path / "a.parquet")

    with pytest.raises(InvalidRequestError, match=rf"column a {problem}.*Try:"):
        next(Parquet(str(tmp_path)).read(0, 0))
