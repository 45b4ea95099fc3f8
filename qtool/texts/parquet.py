"""Rows of Parquet, as the hub keeps datasets: of the columns that records have, some at a time."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qtool.errors import SourceError
from qtool.texts.chats import COLUMNS, PAIR
from qtool.texts.records import TEXT, Record, check_columns
from qtool.texts.stored import module

_ROWS, _BYTES = 256, 1 << 23  # that are read together, at most
_FEW = 16  # rows, where values that are the same may be there once, as pyarrow writes them
_BUFFER = 1 << 20  # bytes of a column of a file that are read together: its parts may be large
_ROWS_OF_A_PAGE = 1024  # after which writers look at how long it is; a page is read as a whole


def rows(path: Path, read: Callable[[int], object]) -> Iterator[Record]:
    """As records of JSON would be: what is null is not there, and a row of nulls is none.
    read: is told of bytes of the file, as if each row took as many. SourceError."""
    pyarrow, parquet = module("pyarrow", path), module("pyarrow.parquet", path)
    done, size = 0, path.stat().st_size
    try:
        with parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as file:
            check_columns(path, file.schema_arrow.names, chats=True)
            columns, metadata, number = _columns(file), file.metadata, 0
            count = max(metadata.num_rows, 1)
            parts = [part for _, group in _groups(metadata, columns) for part in group]
            most = min(_FEW, _ROWS) if any(one.has_dictionary_page for one in parts) else _ROWS
            total = sum(one.total_uncompressed_size for one in parts)
            together = min(most, _BYTES * count // max(total, 1))
            for batch in file.iter_batches(max(1, together), columns=columns, use_threads=False):
                for record in batch.to_pylist():
                    number += 1
                    if there := _without_nulls(record):
                        yield f"{path}: row {number}", there
                read(size * number // count - done)
                done = size * number // count
    # ValueError and OverflowError: of values that Python has not.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise SourceError(
            f"{path}: cannot be read as Parquet ({said[:200]}); fetch it again, or save its texts "
            "as JSONL"
        ) from None


def largest_page(path: Path) -> int:
    """Bytes of a page of those that are read, as far as the file's metadata tells; 0 of none that
    can be read."""
    pyarrow, parquet = module("pyarrow", path), module("pyarrow.parquet", path)
    try:
        with parquet.ParquetFile(path) as file:
            return max(
                (
                    one.total_uncompressed_size * _ROWS_OF_A_PAGE // max(count, _ROWS_OF_A_PAGE)
                    for count, group in _groups(file.metadata, _columns(file))
                    for one in group
                ),
                default=0,
            )
    except (pyarrow.ArrowException, OSError, ValueError):
        return 0


def _columns(file: Any) -> list[str]:
    return [name for name in file.schema_arrow.names if name in (TEXT, *PAIR, *COLUMNS)]


def _groups(metadata: Any, columns: list[str]) -> list[tuple[int, list[Any]]]:
    """Of each group of rows, how many they are, and what these columns are stored in."""
    found = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        parts = [group.column(i) for i in range(group.num_columns)]
        own = [one for one in parts if one.path_in_schema.partition(".")[0] in columns]
        found.append((group.num_rows, own))
    return found


def _without_nulls(value: Any) -> Any:
    """A field that an object does not have is null, where all of a column have the same ones."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
