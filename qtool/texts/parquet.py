"""Rows of Parquet, as the hub keeps datasets: of the columns that records have, some at a time."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qtool.errors import SourceError
from qtool.texts.chats import COLUMNS, PAIR
from qtool.texts.records import TEXT, Record, has_columns
from qtool.texts.stored import module

_ROWS = 256  # that are read together
_BUFFER = 1 << 20  # bytes of a column of a file that are read together: its parts may be large


def rows(path: Path, read: Callable[[int], object]) -> Iterator[Record]:
    """As records of JSON would be: what is null is not there, and a row of nulls is none.
    read: is told of bytes of the file, as if each row took as many. SourceError."""
    pyarrow, parquet = module("pyarrow", path), module("pyarrow.parquet", path)
    done, size = 0, path.stat().st_size
    try:
        with parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as file:
            names = file.schema_arrow.names
            if not has_columns(names):
                raise SourceError(
                    f"{path}: expected a column named text (or prompt and completion), messages or "
                    f"conversations, once; found {', '.join(names)[:80]}"
                )
            columns = [name for name in names if name in (TEXT, *PAIR, *COLUMNS)]
            number, rows = 0, max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(_ROWS, columns=columns, use_threads=False):
                for record in batch.to_pylist():
                    number += 1
                    if there := _without_nulls(record):
                        yield f"{path}: row {number}", there
                read(size * number // rows - done)
                done = size * number // rows
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise SourceError(f"{path}: not Parquet, or damaged ({said[:200]})") from None


def _without_nulls(value: Any) -> Any:
    """A field that an object does not have is null, where all of a column have the same ones."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
