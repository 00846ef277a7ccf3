"""Rows of Parquet and Arrow files and of datasets, as plain objects, a small record batch at a time.

Columns that no row form has are not read. JSON inside a column stays text, for `parse_row` to read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from draftmill.text.sources import split_hub_name

BATCH_ROWS = 64

# All that conversations.py reads of a row.
ROW_FIELDS = (
    *("messages", "conversations", "system", "prompt", "input_ids", "loss_mask", "assistant_masks", "mask"),
    *("tools", "functions", "documents", "chat_template_kwargs", "response_ids", "finish"),
)
_FORMS = ("messages", "conversations", "prompt", "input_ids")

Batch = pa.RecordBatch | pa.Table


class BrokenTable(Exception):
    """The rest of the table cannot be read."""


def rows_of(batches: Iterable[Batch], limit: int) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """(row, its bytes); None in place of a row over `limit` bytes. Raises `BrokenTable`."""
    pending = iter(batches)
    while True:
        try:
            batch = next(pending, None)
        except (pa.ArrowException, OSError) as error:
            raise BrokenTable(str(error).splitlines()[0][:200]) from None
        if batch is None:
            return
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield from _rows(batch.slice(start, BATCH_ROWS), limit)


def _rows(batch: Batch, limit: int) -> Iterator[tuple[dict[str, Any] | None, int]]:
    if batch.nbytes <= limit:
        size = batch.nbytes // max(batch.num_rows, 1)
        yield from ((row, size) for row in batch.to_pylist())
        return
    for i in range(batch.num_rows):
        row = batch.slice(i, 1)
        yield (None, 0) if row.nbytes > limit else (row.to_pylist()[0], row.nbytes)


def parquet_batches(path: str) -> tuple[Iterable[Batch], int]:
    """Batches and the number of rows."""
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path, buffer_size=2**20)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a whole Parquet file ({error}): write or download it again") from None
    columns = row_columns(file.schema_arrow.names, path)
    return file.iter_batches(BATCH_ROWS, columns=columns), file.metadata.num_rows


def arrow_batches(path: str) -> tuple[Iterable[Batch], int]:
    """Batches and the number of rows, 0 where only reading on tells."""
    source = pa.memory_map(path)
    try:
        if source.read(6) == b"ARROW1":
            file = pa.ipc.open_file(source)
            columns = row_columns(file.schema.names, path)
            return (file.get_batch(i).select(columns) for i in range(file.num_record_batches)), 0
        source.seek(0)
        stream = pa.ipc.open_stream(source)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a whole Arrow file ({error}): write or download it again") from None
    columns = row_columns(stream.schema.names, path)
    return (batch.select(columns) for batch in stream), 0


def saved_dataset_batches(folder: str) -> tuple[Iterable[Batch], int]:
    """Of a folder that `save_to_disk` wrote."""
    datasets = _datasets(folder)
    try:
        dataset = datasets.load_from_disk(folder)
    except Exception as error:  # a library's many ways to say that the folder is damaged
        raise ValueError(f"{folder} is not a whole dataset folder ({error}): save it again") from None
    if isinstance(dataset, datasets.DatasetDict):
        if len(dataset) != 1:
            parts = ", ".join(os.path.join(folder, split) for split in dataset)
            raise ValueError(f"{folder} holds several splits: name the folder of one of them: {parts}")
        dataset = next(iter(dataset.values()))
    columns = row_columns(dataset.column_names, folder)
    return dataset.select_columns(columns).with_format("arrow").iter(BATCH_ROWS), len(dataset)


def hub_batches(name: str) -> tuple[Iterable[Batch], int]:
    """Of `hub:owner/name[/config][@revision][:split]`, streamed."""
    datasets = _datasets(name)
    path, config, revision, split = split_hub_name(name)
    try:
        if split is None:
            splits = datasets.get_dataset_split_names(path, config, revision=revision)
            if len(splits) != 1:
                raise ValueError(f"{name} has several splits: add one of them: {', '.join(splits)}")
            split = splits[0]
        stream = datasets.load_dataset(path, config, split=split, revision=revision, streaming=True)
        names = stream.column_names or stream.resolve_features().column_names
    except ValueError:
        raise
    except Exception as error:  # the network, the hub and the library each have their own
        raise ValueError(
            f"{name} cannot be read from the hub ({type(error).__name__}: {str(error).splitlines()[0][:200]}): check "
            "the name and the network, or download the dataset and give its files"
        ) from None
    return stream.select_columns(row_columns(names, name)).with_format("arrow").iter(BATCH_ROWS), 0


def row_columns(names: list[str], source: str) -> list[str]:
    found = [name for name in names if name in ROW_FIELDS]
    if not any(name in _FORMS for name in found):
        raise ValueError(
            f"{source} has the columns {', '.join(names) or '(none)'}, but a row needs one of {', '.join(_FORMS)}: "
            "rename the column"
        )
    return found


def _datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{name} is read with the datasets library: pip install 'draftmill[datasets]'") from None
    return datasets
