"""Rows of Parquet files as a stream; needs pyarrow (extra [spark])."""

from collections.abc import Iterator, Sequence
from typing import Any

from pscommon.core.errors import InvalidRequestError

BATCH_ROWS_COUNT = 1024
"""Rows that are decoded at a time."""


class Parquet:
    """The rows of a folder of Parquet files: `job.batches(rows, ..., sources=rows.sources)`.

    Each row group is a source, which one worker reads at a time. A row is a tuple with the values
    of the columns: numbers and booleans as numpy scalars (decimals as float64), texts, and lists
    of numbers as arrays.

    Args:
        uri: Folder or file: a path, or a URI of a file system of pyarrow (file, hdfs, s3, gs).
        columns: Names in the order of the tuple; None: all.

    Attributes:
        sources: Number of row groups.
        columns: Names of the columns.

    Raises:
        InvalidRequestError: There are no such files or columns, or pyarrow is missing.
    """

    def __init__(self, uri: str, columns: Sequence[str] | None = None) -> None:
        try:
            from pyarrow import fs, parquet
        except ImportError as error:
            raise InvalidRequestError(
                "reading Parquet needs pyarrow. Try: `pip install 'paramserver[spark]'`"
            ) from error
        try:
            self._files, path = fs.FileSystem.from_uri(_with_scheme(uri))
            found = self._files.get_file_info(fs.FileSelector(path, recursive=True))
        except (OSError, ValueError) as error:
            raise InvalidRequestError(f"cannot read {uri}: {error}") from error
        names = sorted(info.path for info in found if info.path.endswith(".parquet"))
        self._groups: list[tuple[str, int]] = []
        self._rows: list[int] = []
        known: list[str] = []
        for name in names:
            with self._files.open_input_file(name) as file:
                metadata = parquet.ParquetFile(file).metadata
            known = known or list(metadata.schema.to_arrow_schema().names)
            for group in range(metadata.num_row_groups):
                if rows := metadata.row_group(group).num_rows:
                    self._groups.append((name, group))
                    self._rows.append(rows)
        if not self._groups:
            raise InvalidRequestError(f"{uri} has no rows in Parquet files")
        self.columns = list(columns or known)
        if missing := [name for name in self.columns if name not in known]:
            raise InvalidRequestError(
                f"{uri} has no column {', '.join(missing)}. Try: some of {', '.join(known)}"
            )
        self.sources = len(self._groups)

    def read(self, source: int, offset: int) -> Iterator[tuple[Any, ...]]:
        """Return the rows of a row group after the first `offset` ones."""
        from pyarrow import parquet

        name, group = self._groups[source]
        if offset >= self._rows[source]:
            return
        with self._files.open_input_file(name) as file:
            batches = parquet.ParquetFile(file).iter_batches(
                BATCH_ROWS_COUNT, row_groups=[group], columns=self.columns
            )
            for batch in batches:
                if offset >= batch.num_rows:
                    offset -= batch.num_rows
                    continue
                columns = [_values(batch.column(each), each) for each in self.columns]
                yield from list(zip(*columns, strict=True))[offset:]
                offset = 0


def _with_scheme(uri: str) -> str:
    """Return the URI as pyarrow knows it: Hadoop's s3a is its s3."""
    from pathlib import Path

    if uri.startswith("s3a://"):
        return "s3://" + uri.removeprefix("s3a://")
    if "://" in uri or uri.startswith("file:"):
        return uri
    return Path(uri).absolute().as_uri()


def _values(column: Any, name: str) -> Sequence[Any]:
    """Return the values of a column: an array of numbers or texts, or a list of arrays."""
    import numpy as np
    import pyarrow as pa

    types, kind = pa.types, column.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    value = kind.value_type if is_list else kind
    if column.null_count or (is_list and column.flatten().null_count):
        raise InvalidRequestError(
            f"column {name} has empty values (NULL). Try: df.dropna() or df.fillna(...)"
        )
    if types.is_decimal(value):  # what Spark makes of 1 / 2.0
        column = column.cast(pa.list_(pa.float64()) if is_list else pa.float64())
    elif not (
        types.is_integer(value)
        or types.is_floating(value)
        or types.is_boolean(value)
        or (types.is_string(value) and not is_list)
    ):
        raise InvalidRequestError(
            f"column {name} is a {kind}. Try: numbers, texts or arrays of numbers "
            "(pyspark.ml.functions.vector_to_array, or a cast), or columns= without it"
        )
    values: Sequence[Any] = column.to_numpy(zero_copy_only=False)
    # copies: torch wants arrays that it may write to
    return [np.array(row) for row in values] if is_list else values
