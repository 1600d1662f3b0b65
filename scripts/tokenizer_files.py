"""Tokenizers for prepare_data.py: bytes, Hugging Face tokenizer.json, and both file formats of tiktoken."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

BYTE_VOCABULARY = 257  # 256 byte values and the end-of-document token
END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


class DataError(Exception):
    """A bad input; its message is all that the user sees."""


def require(module: str, package: str, purpose: str) -> ModuleType:
    """Import an optional dependency.

    Raises:
        DataError: It isn't installed; the message names the package.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{purpose} needs the package {package}: pip install {package} ({error})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    """What a worker process needs to load the tokenizer: the command line's choices.

    Attributes:
        path: "byte", or a tokenizer file or directory.
        special_tokens: Keep what a Hugging Face tokenizer's post-processor adds (BOS and the like).
        eod_token: Name of the end-of-document token; None: found out from the tokenizer's files.
        tiktoken_pattern: "v1" or "v2" (Megatron's names), or a regular expression.
        tiktoken_num_special_tokens: Ids kept free below the ranks of a Megatron tiktoken file.
    """

    path: str
    special_tokens: bool = True
    eod_token: str | None = None
    tiktoken_pattern: str = "v2"
    tiktoken_num_special_tokens: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A loaded tokenizer.

    Attributes:
        encode: Text to token ids.
        vocab_size: Number of ids, special tokens included.
        eod: Id of the end-of-document token, if there is one.
        megatron_flags: Flags that build a tokenizer with these ids in a Megatron training script.
    """

    encode: Callable[[str], list[int]]
    vocab_size: int
    eod: int | None
    megatron_flags: list[str]


def null_tokenizer_flags(vocab_size: int, eod: int | None) -> list[str]:
    """Flags for pretraining on ready token ids: Megatron needs no more than their number and EOD."""
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size)]
    if eod is not None and eod != vocab_size - 1:
        flags += ["--null-tokenizer-eod-id", str(eod)]
    return flags


def load_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Load the tokenizer that a path stands for, by the look of its files.

    Raises:
        DataError: There is no such file, its format is unknown, or its package isn't installed.
    """
    if spec.path == "byte":
        return Tokenizer(
            encode=lambda text: list(text.encode()),
            vocab_size=BYTE_VOCABULARY,
            eod=BYTE_VOCABULARY - 1,
            megatron_flags=null_tokenizer_flags(BYTE_VOCABULARY, BYTE_VOCABULARY - 1),
        )
    path = Path(spec.path)
    if not path.exists():
        raise DataError(f"--tokenizer {spec.path}: no such file; give 'byte', a file or a directory")
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"--tokenizer {spec.path}: the directory has no tokenizer.json; transformers writes one with "
            f"AutoTokenizer.from_pretrained({spec.path!r}).save_pretrained(DIRECTORY)"
        )
    if file.suffix == ".tiktoken":
        return _load_tiktoken_ranks(file, spec)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(
            f"--tokenizer {file}: not JSON ({error}); known formats: a Hugging Face tokenizer.json, "
            "Megatron's tiktoken vocabulary (.json) and tiktoken's own (.tiktoken)"
        ) from error
    if isinstance(content, list):
        return _load_megatron_tiktoken(file, len(content), spec)
    return _load_hugging_face(file, content, spec)


def _load_hugging_face(file: Path, content: dict[str, Any], spec: TokenizerSpec) -> Tokenizer:
    """A tokenizer.json; EOD is what --eod-token or tokenizer_config.json names, or a well-known name."""
    tokenizers = require("tokenizers", "tokenizers", f"--tokenizer {file}")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the package raises plain Exception
        raise DataError(f"--tokenizer {file}: not a Hugging Face tokenizer.json ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    vocab_size = max(vocabulary.values()) + 1
    config_file = file.with_name("tokenizer_config.json")
    name = spec.eod_token
    if name is None and config_file.is_file():
        name = json.loads(config_file.read_text(encoding="utf-8")).get("eos_token")
        name = name["content"] if isinstance(name, dict) else name
    if name is None:
        name = next((known for known in END_OF_DOCUMENT_NAMES if known in vocabulary), None)
    if name is not None and name not in vocabulary:
        raise DataError(f"--eod-token {name}: not in the vocabulary of {file}")
    eod = vocabulary[name] if name is not None else None
    flags = null_tokenizer_flags(vocab_size, eod)
    return Tokenizer(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=spec.special_tokens).ids,
        vocab_size=vocab_size,
        eod=eod,
        megatron_flags=flags,
    )


def _load_megatron_tiktoken(file: Path, tokens: int, spec: TokenizerSpec) -> Tokenizer:
    """Megatron's JSON format, read by Megatron's own class: ranks lie above its special tokens."""
    require("tiktoken", "tiktoken", f"--tokenizer {file}")
    if spec.eod_token is not None:
        raise DataError("--eod-token: Megatron's tiktoken format always ends documents with </s>; leave it out")
    with quiet_imports():
        from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer
    vocab_size = tokens + spec.tiktoken_num_special_tokens
    try:
        tokenizer = TikTokenTokenizer(
            str(file),
            num_special_tokens=spec.tiktoken_num_special_tokens,
            pattern=spec.tiktoken_pattern,
            vocab_size=vocab_size,
        )
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"--tokenizer {file}: Megatron's tiktoken loader refuses it ({type(error).__name__}: {error}); "
            'expected [{"rank": 0, "token_bytes": base64, "token_str": text}, …] whose first 256 tokens are '
            "the bytes in order, --tiktoken-num-special-tokens of at least 7, --tiktoken-pattern v1 or v2"
        ) from error
    flags = ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", str(file.resolve())]
    flags += ["--vocab-size", str(vocab_size), "--tiktoken-pattern", spec.tiktoken_pattern]
    flags += ["--tiktoken-num-special-tokens", str(spec.tiktoken_num_special_tokens)]
    return Tokenizer(encode=tokenizer.text_to_ids, vocab_size=vocab_size, eod=tokenizer.eod, megatron_flags=flags)


def _load_tiktoken_ranks(file: Path, spec: TokenizerSpec) -> Tokenizer:
    """tiktoken's own format, lines of base64 and rank; the end-of-document token follows the last rank."""
    tiktoken = require("tiktoken", "tiktoken", f"--tokenizer {file}")
    loader = importlib.import_module("tiktoken.load")
    pattern = spec.tiktoken_pattern
    if pattern in ("v1", "v2"):
        with quiet_imports():
            patterns = importlib.import_module("megatron.core.tokenizers.text.libraries.tiktoken_tokenizer")
        pattern = getattr(patterns, f"_PATTERN_TIKTOKEN_{pattern.upper()}")
    try:
        ranks = loader.load_tiktoken_bpe(str(file))
        eod = max(ranks.values()) + 1
        encoding = tiktoken.Encoding(
            name=file.stem,
            pat_str=pattern,
            mergeable_ranks=ranks,
            special_tokens={spec.eod_token or END_OF_DOCUMENT_NAMES[0]: eod},
        )
    except Exception as error:  # bad base64, bad rank, bad pattern
        raise DataError(f"--tokenizer {file}: not a tiktoken file, or a bad --tiktoken-pattern ({error})") from error
    return Tokenizer(
        encode=encoding.encode_ordinary,
        vocab_size=eod + 1,
        eod=eod,
        megatron_flags=null_tokenizer_flags(eod + 1, eod),
    )


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Megatron's import warns about each absent accelerator package; none of them matters here."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
