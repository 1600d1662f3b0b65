"""scripts/prepare_data.py: what comes back from Megatron's IndexedDataset is what went in."""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import corpus_files  # noqa: E402
import prepare_data  # noqa: E402
import tokenizer_files  # noqa: E402

TEXTS = ["def f():\n    return 1\n", "naïve café – 東京 🙂\n", "line\r\nends\r\n", "x" * 5000]


def build(*arguments: object) -> None:
    prepare_data.build(prepare_data.parse_args([str(argument) for argument in arguments]))


def read(prefix: Path) -> list[np.ndarray]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert list(dataset.document_indices) == list(range(len(dataset) + 1)), "one sequence a document"
    return [np.array(dataset[i]) for i in range(len(dataset))]


def read_bytes(prefix: Path) -> list[bytes]:
    return [document.astype(np.uint8).tobytes() for document in read(prefix)]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    directory = tmp_path / "src"
    for i, text in enumerate(TEXTS):
        file = directory / f"d{i % 2}" / f"{i}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    (directory / "d0" / "notes.md").write_text("not Python")
    (directory / "d0" / ".hidden.py").write_text("hidden")
    (directory / "test").mkdir()
    (directory / "test" / "t.py").write_text("excluded")
    return directory


def test_text_directory_comes_back_byte_for_byte(sources: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "out" / "corpus"
    build(
        "--input", sources, "--glob", "**/*.py", "--exclude", "test/*", "--tokenizer", "byte",
        "--output-prefix", prefix,
    )  # fmt: skip
    assert read_bytes(prefix) == [TEXTS[i].encode() for i in (0, 2, 1, 3)], "sorted by path, newlines untouched"
    summary = json.loads(prefix.with_suffix(".json").read_text())
    assert (summary["documents"], summary["tokens"]) == (4, sum(len(t.encode()) for t in TEXTS))
    assert summary["text_bytes"] == summary["tokens"]
    assert sorted(p.name for p in prefix.parent.iterdir()) == ["corpus.bin", "corpus.idx", "corpus.json"]


def test_eod_ends_every_document_and_is_what_megatron_will_look_for(sources: Path, tmp_path: Path) -> None:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    prefix = tmp_path / "corpus"
    build("--input", sources, "--tokenizer", "byte", "--append-eod", "--output-prefix", prefix)
    flags = json.loads(prefix.with_suffix(".json").read_text())["megatron_flags"]
    assert flags == ["--tokenizer-type", "NullTokenizer", "--vocab-size", "257"]
    args = argparse.Namespace(tokenizer_type=flags[1], vocab_size=int(flags[3]), pad_vocab_size=False)
    eod = build_tokenizer(args).eod
    for document in read(prefix):
        assert document[-1] == eod
        assert (document[:-1] < 256).all()
        assert document.dtype == np.uint16


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_jsonl(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"corpus{suffix}"
    lines = "\n".join(json.dumps({"content": text, "id": 3}) for text in TEXTS) + "\n\n"
    file.write_bytes(gzip.compress(lines.encode()) if suffix.endswith("gz") else lines.encode())
    prefix = tmp_path / "out"
    build("--input", file, "--json-key", "content", "--tokenizer", "byte", "--output-prefix", prefix)
    assert read_bytes(prefix) == [text.encode() for text in TEXTS]


def test_progress_adds_up_to_the_size_of_the_files(sources: Path, tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n\n" for text in TEXTS).rstrip("\n") + "\n")
    files = [lines, *corpus_files.find_inputs([str(sources)], "**/*", [])]
    documents = list(corpus_files.read_documents(files, "auto", "text"))
    assert sum(d.input_bytes for d in documents) == sum(f.stat().st_size for f in files)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file, prefix = tmp_path / "a.parquet", tmp_path / "out"
    parquet.write_table(pyarrow.table({"content": TEXTS, "n": [1, 2, 3, 4]}), file)
    build("--input", file, "--parquet-column", "content", "--tokenizer", "byte", "--output-prefix", prefix)
    assert read_bytes(prefix) == [text.encode() for text in TEXTS]
    documents = corpus_files.read_documents([file], "auto", "content")
    assert sum(d.input_bytes for d in documents) == file.stat().st_size
    with pytest.raises(prepare_data.DataError, match=r"--parquet-column text: .* columns content, n"):
        build("--input", file, "--tokenizer", "byte", "--output-prefix", tmp_path / "other")
    with pytest.raises(prepare_data.DataError, match=r"row 1 .* is int, not text"):
        build("--input", file, "--parquet-column", "n", "--tokenizer", "byte", "--output-prefix", tmp_path / "o")


@pytest.fixture
def hugging_face(tmp_path: Path) -> Path:
    """A byte-level BPE trained here, saved as transformers saves it, which starts every text with <s>."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import models, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(max_length=8)
    directory = tmp_path / "hf"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    return directory


def test_hugging_face_directory(hugging_face: Path, sources: Path, tmp_path: Path) -> None:
    import tokenizers

    reference = tokenizers.Tokenizer.from_file(str(hugging_face / "tokenizer.json"))
    reference.no_truncation()
    prefix = tmp_path / "out"
    build("--input", sources / "d1", "--tokenizer", hugging_face, "--append-eod", "--output-prefix", prefix)
    expected = [[*reference.encode(TEXTS[i]).ids, 1] for i in (1, 3)]
    assert [list(document) for document in read(prefix)] == expected
    assert expected[0][0] == 0, "the post-processor's <s>"
    size = reference.get_vocab_size()
    flags = json.loads(prefix.with_suffix(".json").read_text())["megatron_flags"]
    assert flags == tokenizer_files.null_tokenizer_flags(size, 1)
    assert flags[-2:] == ["--null-tokenizer-eod-id", "1"]
    plain = tmp_path / "plain"
    build(
        "--input", sources / "d1", "--tokenizer", hugging_face / "tokenizer.json", "--no-special-tokens",
        "--output-prefix", plain,
    )  # fmt: skip
    assert [list(document) for document in read(plain)] == [ids[1:-1] for ids in expected]


def test_large_vocabularies_are_stored_as_upstream_does(sources: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import models, pre_tokenizers

    words = {"[UNK]": 0, **{f"w{i}": i for i in range(1, 70_000)}}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("w1 w69999 other w65536")
    build(
        "--input", tmp_path / "a.txt", "--tokenizer", tmp_path / "words.json",
        "--output-prefix", tmp_path / "out",
    )  # fmt: skip
    (document,) = read(tmp_path / "out")
    assert document.dtype == np.int32
    assert list(document) == [1, 69999, 0, 65536]


def test_megatron_tiktoken_file(sources: Path, tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    tokens = [bytes([i]) for i in range(256)] + [b"re", b"ret", b"xx", b"xxxx"]
    file = tmp_path / "vocab.json"
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": t.decode(errors="replace")}
        for i, t in enumerate(tokens)
    ]
    file.write_text(json.dumps(entries))
    prefix = tmp_path / "out"
    build(
        "--input", sources / "d0" / "0.py", "--tokenizer", file, "--tiktoken-num-special-tokens", 10,
        "--append-eod", "--output-prefix", prefix,
    )  # fmt: skip
    summary = json.loads(prefix.with_suffix(".json").read_text())
    flags = dict(zip(*[iter(summary["megatron_flags"])] * 2, strict=True))
    args = argparse.Namespace(
        tokenizer_type=flags["--tokenizer-type"],
        tokenizer_model=flags["--tokenizer-model"],
        vocab_size=int(flags["--vocab-size"]),
        tiktoken_pattern=flags["--tiktoken-pattern"],
        tiktoken_num_special_tokens=int(flags["--tiktoken-num-special-tokens"]),
        chat_template=None,
        special_tokens=None,
        metadata_path=None,
        pad_vocab_size=False,
    )
    megatron = build_tokenizer(args)
    (document,) = read(prefix)
    assert list(document) == [*megatron.tokenize(TEXTS[0]), megatron.eod]
    assert 256 + 1 + 10 in document, "the merge 'ret', above ten special tokens"
    assert summary["vocab_size"] == megatron.vocab_size
    with pytest.raises(prepare_data.DataError, match="--eod-token: Megatron's tiktoken format"):
        build("--input", sources, "--tokenizer", file, "--eod-token", "</s>", "--output-prefix", tmp_path / "o")


def test_tiktoken_file_whose_first_ranks_are_not_the_bytes_in_order(sources: Path, tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    tokens = [bytes([255 - i]) for i in range(256)] + [b"re", b"ret"]
    file = tmp_path / "own.tiktoken"
    file.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    pattern = r"\p{L}+|\P{L}+"
    prefix = tmp_path / "out"
    build(
        "--input", sources / "d0" / "0.py", "--tokenizer", file, "--tiktoken-pattern", pattern,
        "--append-eod", "--output-prefix", prefix,
    )  # fmt: skip
    ranks = {token: i for i, token in enumerate(tokens)}
    reference = tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    (document,) = read(prefix)
    assert list(document) == [*reference.encode(TEXTS[0]), 258]
    assert json.loads(prefix.with_suffix(".json").read_text())["vocab_size"] == 259


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "nowhere", "--tokenizer", "byte"], "--input nowhere: no file found"),
        (["--input", "src", "--glob", "*.rs", "--tokenizer", "byte"], r"no file found \(--glob \*\.rs"),
        (["--input", "src", "--tokenizer", "absent.json"], "--tokenizer absent.json: no such file"),
        (["--input", "src", "--tokenizer", "src"], "the directory has no tokenizer.json"),
        (["--input", "src", "--tokenizer", "src/d0/0.py"], "not JSON .* known formats"),
        (["--input", "empty.txt", "--tokenizer", "byte"], "nothing to train on: 1 empty and 0 skipped"),
        (["--input", "a.jsonl", "--json-key", "body", "--tokenizer", "byte"], "--json-key body: .* only: n"),
        (["--input", "a.jsonl", "--json-key", "n", "--tokenizer", "byte"], "a.jsonl:1 holds int, not text"),
        (["--input", "bad.jsonl", "--tokenizer", "byte"], "bad.jsonl:1: not a JSON object on one line"),
        (["--input", "bad.gz", "--format", "jsonl", "--tokenizer", "byte"], "bad.gz: damaged gzip file"),
        (["--input", "latin.txt", "--tokenizer", "byte"], "not UTF-8 .*--errors replace or --errors skip"),
        (["--input", "latin.txt", "--errors", "skip", "--tokenizer", "byte"], "0 empty and 1 skipped"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message_and_leaves_nothing(
    arguments: list[str], message: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    Path("a.jsonl").write_text('{"n": 1}\n')
    Path("bad.jsonl").write_text("{'text': 1}\n")
    Path("bad.gz").write_bytes(gzip.compress(b'{"text": "abc"}\n' * 99)[:-9])
    Path("latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(prepare_data.DataError, match=message):
        build(*arguments, "--output-prefix", "out/corpus")
    assert not list(Path().glob("out/*")) + list(Path().glob("out/.*"))


def test_eod_that_the_tokenizer_does_not_have(tmp_path: Path, sources: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import models

    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.save(str(tmp_path / "t.json"))
    common = ["--input", sources, "--tokenizer", tmp_path / "t.json", "--output-prefix", tmp_path / "out"]
    with pytest.raises(prepare_data.DataError, match="--append-eod: found no end-of-document token"):
        build(*common, "--append-eod")
    with pytest.raises(prepare_data.DataError, match="--eod-token c: not in the vocabulary"):
        build(*common, "--append-eod", "--eod-token", "c")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(prepare_data.DataError, match=r"needs the package pyarrow: pip install pyarrow"):
        tokenizer_files.require("pyarrow.parquet", "pyarrow", "reading a.parquet")


@pytest.mark.parametrize(("errors", "kept"), [("replace", ["na\ufffdve", "good", "?"]), ("skip", ["good"])])
def test_undecodable_text(errors: str, kept: list[str], tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "1.txt").write_text("good")
    (tmp_path / "2.jsonl").write_text(r'{"text": "\ud800"}' + "\n")
    build(
        "--input",
        tmp_path,
        "--errors",
        errors,
        "--tokenizer",
        "byte",
        "--output-prefix",
        tmp_path / "o" / "c",
    )
    assert read_bytes(tmp_path / "o" / "c") == [text.encode() for text in kept]


def test_an_existing_dataset_is_only_replaced_on_request(sources: Path, tmp_path: Path) -> None:
    common = ["--tokenizer", "byte", "--output-prefix", tmp_path / "out"]
    build("--input", sources / "d0", "--glob", "*.py", *common)
    with pytest.raises(prepare_data.DataError, match=r"out\.idx exists; --overwrite replaces it"):
        build("--input", sources / "d1", *common)
    (tmp_path / "empty").touch()
    with pytest.raises(prepare_data.DataError, match="nothing to train on"):
        build("--input", tmp_path / "empty", *common, "--overwrite")
    assert read_bytes(tmp_path / "out") == [TEXTS[0].encode(), TEXTS[2].encode()], "a failed attempt costs nothing"
    build("--input", sources / "d1", *common, "--overwrite")
    assert read_bytes(tmp_path / "out") == [TEXTS[1].encode(), TEXTS[3].encode()]


def test_output_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    with file.open("w") as lines:
        for i in range(1500):
            lines.write(json.dumps({"text": f"document {i} " * (1 + i % 7)}) + "\n")
    for workers in (1, 3):
        command = [sys.executable, SCRIPTS / "prepare_data.py", "--input", file, "--tokenizer", "byte"]
        command += ["--append-eod", "--workers", str(workers), "--output-prefix", tmp_path / f"w{workers}"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert result.returncode == 0, result.stderr
        assert "1,500 documents" in result.stdout
        assert result.stderr == "", "no warnings of Megatron's imports"
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"w1.{suffix}").read_bytes() == (tmp_path / f"w3.{suffix}").read_bytes()


def test_errors_of_workers_reach_the_user_with_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 200 + '{"other": 1}\n' + '{"text": "a"}\n' * 200)
    command = [
        sys.executable,
        SCRIPTS / "prepare_data.py",
        "--input",
        tmp_path / "a.jsonl",
        "--tokenizer",
        "byte",
    ]
    command += ["--workers", "2", "--output-prefix", tmp_path / "out"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert "a.jsonl:201 has only: other" in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_nothing(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("w") as lines:
        lines.writelines('{"text": "some text of no importance"}\n' for _ in range(3_000_000))
    command = [
        sys.executable,
        SCRIPTS / "prepare_data.py",
        "--input",
        tmp_path / "a.jsonl",
        "--tokenizer",
        "byte",
    ]
    process = subprocess.Popen([*command, "--output-prefix", tmp_path / "out"], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.partial-*/out.bin")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert b"Traceback" not in stderr
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
