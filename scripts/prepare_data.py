#!/usr/bin/env python3
"""Build Megatron's indexed dataset (PREFIX.bin and PREFIX.idx) from text, JSONL or parquet files.

Examples:
  # every Python file below a directory, one document a file, one token a byte
  prepare_data.py --input src/ --glob '**/*.py' --tokenizer byte --append-eod --output-prefix data/src
  # JSON lines with a Hugging Face tokenizer
  prepare_data.py --input 'c4/*.jsonl.gz' --json-key text --tokenizer gpt2/ --append-eod --output-prefix c4

PREFIX.json records what was built and which flags a Megatron training script needs to train on it.
The files appear under their names only when they are complete, PREFIX.idx last.
Exit codes: 0 built, 1 bad input, 2 bad command line, 130 interrupted.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import itertools
import json
import multiprocessing
import os
import shlex
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from corpus_files import Document, find_inputs, read_documents
from tokenizer_files import DataError, Tokenizer, TokenizerSpec, load_tokenizer, quiet_imports, require

DOCUMENTS_PER_TASK = 32
TOKENIZER_HELP = """'byte' (UTF-8 bytes; trains with --tokenizer-type NullTokenizer --vocab-size 257, whose
last id ends a document), a Hugging Face tokenizer.json or its directory, Megatron's JSON for tiktoken,
or a .tiktoken file"""


class Encoded(NamedTuple):
    """One document after tokenization: its ids as int32 bytes, none if it was empty or skipped."""

    ids: bytes
    text_bytes: int
    input_bytes: int
    skipped: bool


class Encoder:
    """Turns documents into token ids; one lives in each worker process.

    Args:
        spec: The tokenizer to load.
        json_key: Key of the text in a JSON line.
        append_eod: Whether to end each document with the tokenizer's end-of-document token.
        errors: What to do with text that isn't UTF-8: "strict" (stop), "replace" (by U+FFFD) or "skip".
    """

    def __init__(self, spec: TokenizerSpec, json_key: str, append_eod: bool, errors: str) -> None:
        self.tokenizer = load_tokenizer(spec)
        self._json_key = json_key
        self._eod = self.tokenizer.eod if append_eod else None
        self._skip = errors == "skip"
        self._errors = "replace" if errors == "replace" else "strict"

    def __call__(self, document: Document) -> Encoded:
        """Encode one document.

        Raises:
            DataError: The document can't be read or decoded; the message says which one.
        """
        try:
            # Once more through UTF-8: JSON and parquet can hold lone surrogates, which no tokenizer takes.
            raw = self._text(document).encode("utf-8", self._errors)
        except UnicodeError as error:
            if self._skip:
                return Encoded(b"", 0, document.input_bytes, True)
            remedy = "--errors replace or --errors skip goes on"
            raise DataError(f"{document.origin}: not UTF-8 ({error}); {remedy}") from error
        ids = self.tokenizer.encode(raw.decode()) if raw else []
        if ids and self._eod is not None:
            ids = [*ids, self._eod]
        return Encoded(array.array("i", ids).tobytes(), len(raw), document.input_bytes, False)

    def _text(self, document: Document) -> str:
        payload = document.payload
        if document.kind == "text":
            try:
                payload = Path(document.origin).read_bytes()
            except OSError as error:
                raise DataError(f"{document.origin}: can't be read ({error.strerror})") from error
        text = payload.decode("utf-8", self._errors) if isinstance(payload, bytes) else payload
        if document.kind != "jsonl":
            return text
        try:
            record = json.loads(text)
        except ValueError as error:
            raise DataError(f"{document.origin}: not a JSON object on one line ({error})") from error
        if not isinstance(record, dict) or self._json_key not in record:
            there = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise DataError(f"--json-key {self._json_key}: {document.origin} has only: {there}")
        value = record[self._json_key]
        if not isinstance(value, str):
            raise DataError(f"--json-key {self._json_key}: {document.origin} holds {type(value).__name__}, not text")
        return value


_encoder: Encoder | None = None


def _start_worker(*encoder_args: Any) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the pool
    _encoder = Encoder(*encoder_args)


def _encode_chunk(documents: Sequence[Document]) -> list[Encoded]:
    assert _encoder is not None
    return [_encoder(document) for document in documents]


def encode_all(documents: Iterable[Document], encoder_args: tuple[Any, ...], workers: int) -> Iterator[Encoded]:
    """Encode documents in their order, whatever the number of worker processes.

    Args:
        documents: Consumed as the results are, so that a large file never lies in memory.
        encoder_args: Arguments of Encoder.
        workers: Number of processes; 1 works in this one.

    Raises:
        DataError: From a document, or a worker process died.
    """
    if workers == 1:
        yield from map(Encoder(*encoder_args), documents)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=encoder_args)
    pending: deque[Future[list[Encoded]]] = deque()
    try:
        for chunk in itertools.batched(documents, DOCUMENTS_PER_TASK):
            pending.append(pool.submit(_encode_chunk, chunk))
            if len(pending) == 4 * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("a worker process died (out of memory?); try fewer --workers") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@dataclass(slots=True)
class Counts:
    """What went into the dataset."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty: int = 0
    skipped: int = 0


def write_dataset(prefix: Path, encoded: Iterable[Encoded], tokenizer: Tokenizer, facts: dict[str, Any]) -> Counts:
    """Write PREFIX.bin, PREFIX.json and PREFIX.idx; all appear at the end, the index last.

    Args:
        prefix: Output path without suffix; its directory is made.
        encoded: Documents in order.
        tokenizer: Says the size of the vocabulary, which decides the integer type as in Megatron's own tools.
        facts: Goes into PREFIX.json beside the counts.

    Raises:
        DataError: There is no token at all.
    """
    with quiet_imports():
        import numpy
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix=f".{prefix.name}.partial-", dir=prefix.parent) as directory:
        partial = Path(directory) / prefix.name
        builder = IndexedDatasetBuilder(f"{partial}.bin", dtype=dtype)
        with contextlib.closing(builder.data_file):
            for document in encoded:
                ids = numpy.frombuffer(document.ids, dtype=numpy.int32)
                if ids.size:
                    builder.add_document(ids, [ids.size])
                counts.documents += bool(ids.size)
                counts.tokens += ids.size
                counts.text_bytes += document.text_bytes
                counts.skipped += document.skipped
                counts.empty += not ids.size and not document.skipped
        if not counts.tokens:
            raise DataError(f"nothing to train on: {counts.empty} empty and {counts.skipped} skipped documents")
        builder.finalize(f"{partial}.idx")
        summary = {**facts, **asdict(counts), "dtype": numpy.dtype(dtype).name}
        Path(f"{partial}.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        Path(f"{prefix}.idx").unlink(missing_ok=True)  # an old index must never meet new data
        for suffix in (".bin", ".json", ".idx"):
            os.replace(f"{partial}{suffix}", f"{prefix}{suffix}")
    return counts


def build(args: argparse.Namespace) -> None:
    """Build the dataset that the command line asks for and print a summary.

    Raises:
        DataError: Anything that the user can put right.
    """
    tqdm = require("tqdm", "tqdm", "the progress bar").tqdm
    prefix = Path(args.output_prefix)
    if not args.overwrite and Path(f"{prefix}.idx").exists():
        raise DataError(f"--output-prefix {prefix}: {prefix}.idx exists; --overwrite replaces it")
    spec = TokenizerSpec(
        path=args.tokenizer,
        special_tokens=not args.no_special_tokens,
        eod_token=args.eod_token,
        tiktoken_pattern=args.tiktoken_pattern,
        tiktoken_num_special_tokens=args.tiktoken_num_special_tokens,
    )
    tokenizer = load_tokenizer(spec)
    if args.append_eod and tokenizer.eod is None:
        raise DataError(f"--append-eod: found no end-of-document token in {spec.path}; name it with --eod-token")
    paths = find_inputs(args.input, args.glob, args.exclude)
    start = time.monotonic()
    encoder_args = (spec, args.json_key, args.append_eod, args.errors)
    documents = read_documents(paths, args.format, args.parquet_column)
    facts = {
        "tokenizer": spec.path,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "append_eod": args.append_eod,
        "megatron_flags": tokenizer.megatron_flags,
        "input": args.input,
        "files": len(paths),
    }
    input_bytes = sum(path.stat().st_size for path in paths)
    with tqdm(total=input_bytes, unit="B", unit_scale=True, desc=prefix.name, disable=None) as bar:

        def shown() -> Iterator[Encoded]:
            for document in encode_all(documents, encoder_args, args.workers):
                bar.update(document.input_bytes)
                yield document

        counts = write_dataset(prefix, shown(), tokenizer, facts)
    print(
        f"{prefix}: {counts.documents:,} documents, {counts.tokens:,} tokens, {counts.text_bytes:,} bytes; "
        f"{counts.empty:,} empty and {counts.skipped:,} undecodable documents left out; "
        f"{time.monotonic() - start:.1f} s"
    )
    print(f"Train on it with: --data-path {shlex.join([str(prefix), *tokenizer.megatron_flags])}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files, directories or glob patterns")
    add("--output-prefix", required=True, metavar="PREFIX", help="output path without .bin and .idx")
    add("--tokenizer", required=True, metavar="byte|PATH", help=TOKENIZER_HELP)
    add("--format", choices=["auto", "text", "jsonl", "parquet"], default="auto", help="default: by file name")
    add("--glob", default="**/*", metavar="PATTERN", help="which files of a directory (default: %(default)s)")
    add(
        "--exclude",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="files to leave out, relative to the directory",
    )
    add(
        "--json-key",
        default="text",
        metavar="KEY",
        help="key of the text in JSON lines (default: %(default)s)",
    )
    add("--parquet-column", default="text", metavar="NAME", help="column of the text (default: %(default)s)")
    add("--append-eod", action="store_true", help="end every document with the end-of-document token")
    add("--eod-token", metavar="TOKEN", help="its name (default: from the tokenizer's files)")
    add(
        "--no-special-tokens",
        action="store_true",
        help="without the BOS or EOS that a Hugging Face tokenizer adds",
    )
    add(
        "--tiktoken-pattern",
        default="v2",
        metavar="v1|v2|REGEX",
        help="how tiktoken splits (default: %(default)s)",
    )
    add(
        "--tiktoken-num-special-tokens",
        type=int,
        default=1000,
        metavar="N",
        help="as in Megatron (default: 1000)",
    )
    add(
        "--errors",
        choices=["strict", "replace", "skip"],
        default="strict",
        help="text that isn't UTF-8: stop (default), replace by U+FFFD, or skip the document",
    )
    add(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="processes; the output does not depend on their number",
    )
    add("--overwrite", action="store_true", help="replace an existing dataset")
    args = parser.parse_args(arguments)
    if args.workers < 1:
        parser.error(f"--workers {args.workers}: at least 1")
    return args


def main() -> int:
    """Run the program; returns its exit code."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that partial files go away
    try:
        build(parse_args())
    except (DataError, OSError) as error:
        print(f"prepare_data.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("prepare_data.py: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
