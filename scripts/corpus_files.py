"""Input of prepare_data.py: which files to read, and the documents in text, JSONL and parquet files."""

from __future__ import annotations

import fnmatch
import glob
import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tokenizer_files import DataError, require

JSONL_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")


class Document(NamedTuple):
    """One document before tokenization; its payload is a JSON line, a parquet value, or still in its file."""

    kind: str
    origin: str
    payload: str | bytes
    input_bytes: int


def find_inputs(patterns: list[str], file_glob: str, exclude: list[str]) -> list[Path]:
    """Files that the arguments name, each once, sorted within an argument.

    Args:
        patterns: Files, directories or glob patterns.
        file_glob: Which files of a directory, relative to it. Hidden files are left out.
        exclude: Patterns (as in fnmatch, over the path relative to the directory or pattern) to leave out.

    Raises:
        DataError: An argument matches nothing.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        root = Path(pattern)
        if root.is_dir():
            candidates = sorted(path for path in root.glob(file_glob) if path.is_file())
            relative = {path: path.relative_to(root).as_posix() for path in candidates}
            candidates = [path for path in candidates if not any(p[0] == "." for p in relative[path].split("/"))]
        else:
            names = [pattern] if root.is_file() else sorted(glob.glob(pattern, recursive=True))
            candidates = [path for path in map(Path, names) if path.is_file()]
            relative = {path: path.as_posix() for path in candidates}
        kept = [p for p in candidates if not any(fnmatch.fnmatch(relative[p], out) for out in exclude)]
        if not kept:
            raise DataError(f"--input {pattern}: no file found (--glob {file_glob}, --exclude {exclude})")
        found.update(dict.fromkeys(kept))
    return list(found)


def format_of(path: Path, chosen: str) -> str:
    """Format of one file: the chosen one, or (auto) by its suffix, text where the suffix says nothing."""
    if chosen != "auto":
        return chosen
    if path.name.endswith(JSONL_SUFFIXES):
        return "jsonl"
    return "parquet" if path.suffix == ".parquet" else "text"


def read_documents(paths: Iterable[Path], file_format: str, parquet_column: str) -> Iterator[Document]:
    """All documents in order; text files are left to the workers to read."""
    for path in paths:
        kind = format_of(path, file_format)
        if kind == "text":
            yield Document("text", str(path), b"", path.stat().st_size)
        elif kind == "jsonl":
            yield from _read_jsonl(path)
        else:
            yield from _read_parquet(path, parquet_column)


def _read_jsonl(path: Path) -> Iterator[Document]:
    """Lines of a file, gzip or not; blank ones are left out."""
    with path.open("rb") as file:
        lines = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        before = 0
        try:
            for number, line in enumerate(lines, start=1):
                here = file.tell()  # of the compressed file, whose size the progress bar knows
                if line.strip():
                    yield Document("jsonl", f"{path}:{number}", line, here - before)
                    before = here
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: damaged gzip file ({error})") from error


def _read_parquet(path: Path, column: str) -> Iterator[Document]:
    """Rows of one column; each stands for its share of the file in the progress bar."""
    parquet = require("pyarrow.parquet", "pyarrow", f"reading {path}")
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:
        raise DataError(f"{path}: not a parquet file ({error})") from error
    with file:
        if column not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise DataError(f"--parquet-column {column}: {path} has only the columns {names}")
        row, share = 0, path.stat().st_size / max(1, file.metadata.num_rows)
        for batch in file.iter_batches(batch_size=1024, columns=[column]):
            for text in batch.column(0).to_pylist():
                row += 1
                if not isinstance(text, str | bytes):
                    kind = type(text).__name__
                    raise DataError(f"--parquet-column {column}: row {row} of {path} is {kind}, not text")
                # Differences of the rounded running share: they add up to the file's size.
                yield Document("parquet", f"{path}:{row}", text, int(row * share) - int((row - 1) * share))
