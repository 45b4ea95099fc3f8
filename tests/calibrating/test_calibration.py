"""Texts, chunks and their digest; tokenizers; plans of long texts."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from qtool.cli.main import app
from qtool.errors import SourceError, UnsupportedError
from qtool.hub import tiny_folder
from qtool.messages.progress import Progress
from qtool.texts import calibration, stored, tokenizing
from qtool.texts.calibration import calibration_tokens, chunks
from qtool.texts.source import default_text, load_text
from qtool.texts.tokenizing import tokenize
from support.calibrating.text_files import Settings
from support.hub import hub_server

# In a process of its own: huggingface_hub reads its environment when it is imported.
LOAD = """
import json, sys
from qtool.texts.source import load_text
from qtool.errors import QtoolError
found = []
for source in sys.argv[1:]:
    try:
        texts = load_text(source)
        found.append([["".join(text) for text in texts.pieces()], texts.name])
    except QtoolError as error:
        found.append(str(error))
print(json.dumps(found))
"""


def test_chunks_are_the_ones_that_the_permutation_names() -> None:
    ids = np.arange(1005, dtype=np.int64)
    found = chunks(ids, 7, 10, seed=3)
    expected = sorted(np.random.default_rng(3).permutation(100)[:7])
    assert found.shape == (7, 10)
    assert [int(row[0]) // 10 for row in found] == expected
    assert all(np.array_equal(row, np.arange(row[0], row[0] + 10)) for row in found)


def test_all_chunks_can_be_asked_for_but_not_one_more() -> None:
    ids = np.arange(103, dtype=np.int64)
    assert np.array_equal(chunks(ids, 10, 10, 0), ids[:100].reshape(10, 10))
    with pytest.raises(SourceError, match=r"103 tokens, enough for 10 samples of 10, but 11"):
        chunks(ids, 11, 10, 0)


def test_the_default_text_is_on_every_machine() -> None:
    found = load_text(None)
    ((text,),) = found.pieces()
    assert found.name == "pydoc_data.topics" and text == default_text()
    assert len(text) > 400_000 and "assert" in text
    made = calibration_tokens(Settings(samples=128, length=512), tiny_folder())
    assert made.tokens.shape == (128, 512)


def test_the_default_text_is_cut_once_for_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[str] = []

    def counted(text: str, model: Path) -> NDArray[np.int64]:
        cut.append(text)
        return tokenize(text, model)

    monkeypatch.setattr(calibration, "tokenize", counted)
    file = tmp_path / "tokenizer.json"
    shutil.copy(tiny_folder() / "tokenizer.json", file)
    first = calibration_tokens(Settings(), tmp_path)
    assert np.array_equal(calibration_tokens(Settings(), tmp_path).tokens, first.tokens)
    other = calibration_tokens(Settings(samples=1, length=64), tmp_path).tokens
    assert cut == [default_text()]
    whole = tokenize(default_text(), tmp_path)
    assert np.array_equal(first.tokens, chunks(whole, 4, 16, 0))
    assert np.array_equal(other, chunks(whole, 1, 64, 0))
    # Another tokenizer in the same place.
    content = json.loads(file.read_text())
    content["model"]["merges"] = []
    file.write_text(json.dumps(content))
    assert not np.array_equal(calibration_tokens(Settings(), tmp_path).tokens, first.tokens)
    assert len(cut) == 2


def test_the_record_says_what_was_used(tmp_path: Path) -> None:
    text = tmp_path / "some-private-name.txt"
    text.write_text("Once upon a time there was a small model. " * 50)
    found = calibration_tokens(Settings(str(text), seed=5), tiny_folder())
    digest = hashlib.sha256(found.tokens.astype("<i8").tobytes()).hexdigest()
    assert found.record() == {
        "source": "file",
        "samples": 4,
        "length": 16,
        "seed": 5,
        "digest": f"sha256:{digest}",
    }


def test_ids_are_those_of_transformers_without_special_tokens() -> None:
    from transformers import AutoTokenizer

    text = "Hello, world!\n\n  def f(x):\r\n\treturn x**2 — naïve ﬁ 你好 🙂<|endoftext|>"
    theirs = AutoTokenizer.from_pretrained(tiny_folder())
    ours = tokenize(text, tiny_folder())
    assert ours.tolist() == theirs.encode(text, add_special_tokens=False)
    assert theirs.decode(ours) == text


def test_a_tokenizer_that_truncates_or_pads_does_neither(tmp_path: Path) -> None:
    content = json.loads((tiny_folder() / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    text = "one two three four five six seven eight nine"
    assert np.array_equal(tokenize(text, tmp_path), tokenize(text, tiny_folder()))


def test_a_source_that_is_nowhere_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file, and no hub dataset"):
        load_text("no such thing.txt")
    with pytest.raises(SourceError, match="a folder"):
        load_text(str(tmp_path))


def test_too_little_text_is_an_error_with_numbers(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("a few words")
    with pytest.raises(SourceError, match=r"short\.txt\) has \d+ tokens, enough for 0 samples"):
        calibration_tokens(Settings(str(path)), tiny_folder())


def test_a_tokenizer_of_another_model_is_noticed(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_folder() / name).read_bytes())
    (tmp_path / "config.json").write_text('{"vocab_size": 10}')
    with pytest.raises(SourceError, match="do not belong together"):
        calibration_tokens(Settings(), tmp_path)


def test_a_file_that_is_no_tokenizer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SourceError, match="not a tokenizer"):
        tokenize("text", tmp_path)


@pytest.mark.parametrize(
    "model",
    [
        {"type": "BPE"},
        {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]},
        {"type": "nope", "vocab": {}},
        {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"},
    ],
)
def test_a_malformed_tokenizer_is_an_error(model: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(SourceError, match=r"tokenizer\.json: the tokenizer cannot be used \(.+\)"):
        tokenize("text", tmp_path)


def loaded(endpoint: str, cache: Path, *sources: str, **more: str) -> list[Any]:
    """load_text of each source against a hub at `endpoint`; an error is its sentence."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        **more,
    }
    result = subprocess.run(
        [sys.executable, "-c", LOAD, *sources],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert isinstance(found, list)
    return found


def test_a_dataset_of_the_hub(tmp_path: Path) -> None:
    texts, tables = tmp_path / "texts", tmp_path / "tables"
    (texts / "data").mkdir(parents=True)
    tables.mkdir()
    (texts / "README.md").write_text("# texts")
    (texts / "data" / "test.jsonl").write_text('{"text": "test"}\n')
    (texts / "data" / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tables / "train.arrow").write_bytes(b"ARROW1")
    with hub_server.serve({"ann/texts": texts, "ann/tables": tables}) as server:
        cache = tmp_path / "cache"
        first, named, *errors = loaded(
            server.endpoint,
            cache,
            "ann/texts",
            "ann/texts:data/test.jsonl",
            "ann/tables",
            "ann/nothing",
            "ann/texts:data/absent.txt",
        )
    assert first == [["one\ntwo"], "ann/texts:data/train.jsonl"]
    assert named == [["test"], "ann/texts:data/test.jsonl"]
    assert "no file of texts: text, JSON, CSV or Parquet (it has train.arrow)" in errors[0]
    assert "does not exist" in errors[1]
    assert "has no file 'data/absent.txt'" in errors[2]
    # Without a network a file that was named is served from the cache.
    named, gone = loaded(
        server.endpoint, cache, "ann/texts:data/test.jsonl", "ann/tables", HF_HUB_OFFLINE="1"
    )
    assert named == [["test"], "ann/texts:data/test.jsonl"]
    assert "cannot be" in gone


@pytest.mark.parametrize("recipe", ["w4g64-gptq", "q4_k_m-awq-gptq"])
def test_a_plan_says_that_the_text_is_of_no_use(recipe: str, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    words = ["plan", "tiny", "--recipe", recipe, "--json", "--set", f"calibration.source={path}"]

    def warnings() -> list[str]:
        said = CliRunner().invoke(app, words)
        assert said.exit_code == 0, said.output
        return [one for one in json.loads(said.stdout)["warnings"] if "text.jsonl" in one]

    (missing,) = warnings()
    assert missing.startswith(f"calibration.source: {path}: no such file") and "fails on" in missing
    path.write_text('{"text": "a"}\n{"text": 1}\n')
    assert f"{path}:2: expected an object" in warnings()[0]
    path.write_text('{"text": "a"}\n')
    assert not warnings()
    words[-1] = "calibration.source=ann/texts"
    notes = json.loads(CliRunner().invoke(app, words).stdout)["notes"]
    assert any(
        "(ann/texts) is no file here, and a plan looks at no dataset" in one for one in notes
    )
    words[-1] = f"calibration.source={path.with_suffix('.zip')}"
    path.with_suffix(".zip").write_bytes(b"PK")
    assert (
        "an archive; unpack it" in json.loads(CliRunner().invoke(app, words).stdout)["warnings"][0]
    )


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    """What transformers says of it names no file and no way out."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        UnsupportedError, match=r"has no tokenizer; put the model's own \(tokenizer"
    ):
        tokenizing.transformers_tokenizer(tmp_path)


def test_how_much_of_a_long_text_is_done_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "_SHORT", 1000)
    monkeypatch.setattr(calibration, "_LONG", 2000)
    monkeypatch.setattr(stored, "AT_ONCE", 1000)
    path, log = tmp_path / "long.txt", tmp_path / "log"
    for length, shown in ((1500, False), (4500, True)):
        path.write_text("the and in "[: length % 11] + "the and in " * (length // 11))
        found = calibration_tokens(Settings(str(path)), tiny_folder(), Progress(log=log))
        plain = calibration_tokens(Settings(str(path)), tiny_folder())
        assert np.array_equal(found.tokens, plain.tokens) and found.tokens.dtype == np.int64
        said = capsys.readouterr().err
        assert said == ("  encoding the calibration text: 0.0 MB\n" if shown else "")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one["done"] for one in events] == [0, 4500]


@pytest.mark.parametrize("recipe", ["w4g64-gptq", "q4_k_m-awq-gptq"])
def test_a_plan_counts_a_long_text(recipe: str, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    words = ["plan", "tiny", "--recipe", recipe, "--set", f"calibration.source={path}"]
    path.write_text("some words")
    assert CliRunner().invoke(app, [*words, "--max-ram", "600MiB"]).exit_code == 0
    with path.open("r+b") as file:
        file.truncate(200 << 20)  # of which nothing lies on the disk
    settings = ["--samples", "512", "--length", "4096"]  # chosen from more than that
    result = CliRunner().invoke(app, [*words, *settings, "--max-ram", "600MiB"])
    assert "most of it is for the tokens of the whole calibration text" in str(result.exception)
