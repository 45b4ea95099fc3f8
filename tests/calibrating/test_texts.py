"""Arrays of JSON, how much of a long text is read, texts to measure on, datasets of the hub."""

import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from typer.testing import CliRunner

from qtool.cli.main import app
from qtool.errors import SourceError, UnsupportedError
from qtool.hub import tiny_folder
from qtool.messages.progress import Progress
from qtool.texts import records, source, stored
from qtool.texts.calibration import calibration_tokens, chunks
from qtool.texts.datasets import choose
from qtool.texts.mixture import check_source
from qtool.texts.source import load_text, read_text
from qtool.texts.tokenizing import tokenize
from support.calibrating.text_files import SAID, Settings, jsonl, table, told
from support.hub.hub_here import hub_here

PAGE = "https://huggingface.co/datasets/ann/x"


@pytest.mark.parametrize("at_once", [1, 5, 1 << 18])
@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_says_what_its_elements_would_as_lines(
    indent: int | None, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "AT_ONCE", at_once)
    path = tmp_path / "texts.json"
    path.write_text(" \n" + json.dumps(SAID, indent=indent, ensure_ascii=False) + "\n\n")
    assert told(path) == told(jsonl(tmp_path / "texts.jsonl", SAID))
    path.write_text("[ \n]")
    assert told(path) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            '[{"text": "a"}, {"text": 1}]',
            r"element 2: expected .*; its `text` is a number$",
        ),
        ('[{"instruction": "a", "output": "b"}]', r"element 1: .*: name instruction"),
        ('[["a"]]', r"element 1: .*found an array"),
        ('[{"text": "a"}', r"element 1: expected `,` or `\]` behind it; is the file whole"),
        ('[{"text": "a"} {"text": "b"}]', r"element 1: expected `,` or `\]` behind it"),
        ('[{"text": "a"}, ]', r"element 2: the file ends within it; is it whole"),
        ('[{"text": "a"}, {"te', r"element 2: the file ends within it; is it whole"),
        (
            '[{"text": "a",}, {"text": "and so on, and on"}]',
            r"element 1: not JSON \(Expecting",
        ),
        ("[", r"element 1: the file ends within it"),
        ('[["a"]]', r"element 1: .*; found an array"),
        (
            '[{"data": [{"text": "a"}]}]',
            r"element 1: .*; if what is under data",
        ),
        ('[{"text": "a"}] [', r"expected nothing behind its array, found '\['"),
        ('[{"text": "\\ud800"}]', r"element 1: its text has half of a surrogate pair"),
        ("[" * 200_000, r"element 1: not JSON"),
        ('[{"text": "a", "id": ' + "1" * 5000 + "}]", r"element 1: not JSON \(Exceeds the limit"),
    ],
)
def test_a_bad_array_names_the_element(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.json"
    path.write_text(content)
    with pytest.raises(SourceError, match=rf"texts\.json: {said}"):
        check_source(str(path))


def test_an_element_that_is_too_long_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "AT_ONCE", 100)
    monkeypatch.setattr(records, "_LONGEST_ELEMENT", 5000)
    path = tmp_path / "texts.json"
    path.write_text(json.dumps([{"text": "a" * 4000}]))
    assert told(path) == ["a" * 4000]
    path.write_text(json.dumps([{"text": "a" * 100_000}]))
    counts: list[int] = []
    with pytest.raises(SourceError, match="element 1: longer than 0 million characters"):
        told(path, counts.append)
    assert sum(counts) < 20_000


def test_what_is_named_instead_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, name in (
        ("shards", "b.parquet"),
        ("disk/train", "data-0.arrow"),
        ("nothing", "a.bin"),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).write_bytes(b"")
    (tmp_path / "disk" / "dataset_dict.json").write_text("{}")
    (tmp_path / "shards" / "a.jsonl.gz").write_bytes(b"")
    for given, said in (
        ("shards", "a folder; name a file of it, such as a.jsonl.gz; several files are named by"),
        ("disk", "a folder; datasets saved it: save it as Parquet"),
        ("nothing", "a folder; --calibration wants a file: text, JSON, CSV or Parquet"),
        ("shards/*.parquet", "no such file, .*; several files are named by a YAML file"),
        ("", "'': no such file"),
        ("allenai/c4/en/a.json.gz", "; allenai/c4:en/a.json.gz would be one$"),
        ("./data/calib/a.txt", r"owner/name:FILE\)$"),
        ("calib/a.txt", r"^calib/a\.txt: no such file"),  # nobody is asked
        ("calib/mixed.yaml", r"^calib/mixed\.yaml: no such file"),
        ("calib/a.jsonl.gz", r"^calib/a\.jsonl\.gz: no such file"),
        ("-", r"^-: a pipe or a device, and a text is read more than once"),
        ("/dev/null", r"^/dev/null: a pipe or a device, and a text is read more than once"),
        ("hf://datasets/ann/x/data/a.txt", "; ann/x:data/a.txt would be one$"),
        (f"{PAGE}/resolve/main/a.txt?download=true", "; ann/x:a.txt would be one$"),
        (f"{PAGE}/blob/refs%2Fpr%2F1/a.txt", "; ann/x@refs/pr/1:a.txt would be one$"),
        ("disk/train/data-0.arrow", r"Arrow is not read; save it as Parquet"),
    ):
        with pytest.raises((SourceError, UnsupportedError), match=said):
            check_source(given)


def test_of_a_long_text_the_first_tokens_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 million, or 64 times what samples take; what lies behind is not looked at."""
    assert source.most_read(128 * 512) == 1 << 24
    assert source.most_read(512 * 2048) == 64 * 512 * 2048
    monkeypatch.setattr(source, "MOST_READ", 1000)
    monkeypatch.setattr(source, "TIMES", 20)
    monkeypatch.setattr(stored, "AT_ONCE", 1000)
    monkeypatch.setattr("qtool.texts.calibration._LONG", 1)
    monkeypatch.setattr("qtool.texts.calibration._SHORT", 1)
    words = random.Random(1)
    text = " ".join(words.choice(["the", "and", "import", "class", "in"]) for _ in range(400_000))
    short, long = tmp_path / "short.txt", tmp_path / "long.txt"
    long.write_bytes(text.encode() + b"\xff")
    found = calibration_tokens(Settings(str(long)), tiny_folder(), Progress())
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith("note: of the calibration text the first 1,280 tokens are read")
    first = tokenize(text, tiny_folder())[:1280]
    assert np.array_equal(found.tokens, chunks(first, 4, 16, 0))
    short.write_text(text[:4000])  # less than that
    calibration_tokens(Settings(str(short)), tiny_folder(), Progress())
    assert "first" not in capsys.readouterr().err


def test_a_text_to_measure_on_may_be_compressed_or_a_table(tmp_path: Path) -> None:
    said = [{"text": "the and in\n" * 40}, {"text": ""}, {"text": "import the class " * 40}]
    plain = jsonl(tmp_path / "a.jsonl", said)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    rows = table(tmp_path / "a.parquet", said)
    figures = []
    for path in (plain, packed, rows):
        assert "".join(read_text(path)) == "".join(read_text(plain))
        words = ["eval", "tiny", "--text", str(path), "--windows", "1", "--length", "64", "--json"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        figures.append(json.loads(result.stdout)["perplexity"])
    assert figures[0] == figures[1] == figures[2]
    # What is of no use is told before any work.
    for path in (packed, rows):
        path.write_bytes(path.read_bytes()[:-9])
    other = {
        "short.txt.gz": (gzip.compress(b"the and in " * 20), "220 bytes"),
        "latin.txt": ("é".encode("latin-1") * 999, "not UTF-8"),
        "chats.jsonl": (json.dumps(SAID[2]).encode(), "is a chat"),
        "alpaca.json": (b'[{"instruction": "a", "output": "b"}]', "name instruction"),
        "table.csv": (b"id\n1\n", "expected a column named text"),
        "lfs.txt": (b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS"),
    }
    reasons = {packed: "ends within gzip", rows: "read as Parquet"}
    for name, (content, why) in other.items():
        (tmp_path / name).write_bytes(content)
        reasons[tmp_path / name] = why
    for path, why in reasons.items():
        for words in (
            ["matrix", "tiny", "--recipes", "q4_0", "-o", str(tmp_path / "made"), "--eval"],
            ["report", "tiny", "--against", "tiny", "-o", str(tmp_path / "made"), "--text"],
        ):
            result = CliRunner().invoke(app, [*words, str(path), "--windows", "1"])
            assert result.exit_code == 1 and why in str(result.exception)
            assert not (tmp_path / "made").exists()
    with pytest.raises(SourceError, match=r"chats\.parquet: row 1: is a chat"):
        "".join(read_text(table(tmp_path / "chats.parquet", [SAID[2]])))


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["README.md", "data/test.jsonl", "data/train.jsonl"], "data/train.jsonl"),
        (["data/test_sft-0.parquet", "data/train_sft-0.parquet"], "data/train_sft-0.parquet"),
        (["NOTICE.txt", "plain/train-0.parquet"], "plain/train-0.parquet"),
        (["dataset_infos.json", "test.csv"], "test.csv"),
        (["en/c4-train.0.json.gz", "en/c4-train.1.json.gz"], "en/c4-train.0.json.gz"),
        (["val.jsonl.zst", "license.md"], "val.jsonl.zst"),
        (["sg_52k.json", "README.md"], "sg_52k.json"),
        (["requirements.txt", "data/en.parquet"], "data/en.parquet"),
        (["CONTRIBUTING.md", "data/0000.parquet"], "data/0000.parquet"),
        (["docs/training.md", "data/train-00000.parquet"], "data/train-00000.parquet"),
        (["constrained.json", "data.jsonl"], "data.jsonl"),
        (["meta.csv", "train.txt"], "train.txt"),
        (["corpus.txt", "eval_results.csv"], "corpus.txt"),
        (["licensed_text.jsonl", "license.txt"], "licensed_text.jsonl"),
        (["config_a.parquet", "x.csv"], "config_a.parquet"),
    ],
)
def test_which_file_of_a_dataset(
    names: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_, **__: names)
    assert choose("ann/texts") == chosen
    # What `save_to_disk` of datasets makes, and settings, are none.
    names[:] = ["data-0.arrow", "dataset_info.json", "sub/state.json", "trainer_state.json"]
    with pytest.raises(
        UnsupportedError, match=r"has no file of texts: .*\(it has data-0\.arrow, data"
    ):
        choose("ann/texts")


def test_datasets_of_the_hub_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table to calibrate on, one to measure on; a file that is here goes first."""
    folder = tmp_path / "texts" / "data"
    folder.mkdir(parents=True)
    said = [{"text": "import the class and in " * 40, "id": 7}] * 4
    table(folder / "train-0.parquet", said)
    test = table(folder / "test-0.parquet", said[:2])
    out, text = str(tmp_path / "made"), "ann/texts:data/test-0.parquet"

    def ran(*words: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, [*words, "--json"])
        assert result.exit_code == 0, result.output + str(result.exception)
        return cast("dict[str, Any]", json.loads(result.stdout))

    served = {"ann/texts": tmp_path / "texts", "ann/gated": tmp_path / "texts"}
    with hub_here(monkeypatch, tmp_path, served) as hub:
        ran("quantize", "tiny", "--recipe", "w4g128-gptq", "--calibration", "ann/texts",
            "--samples", "2", "--length", "64", "-o", out)  # fmt: skip
        record = json.loads((tmp_path / "made" / "qtool.json").read_text())
        assert record["calibration"]["source"] == "ann/texts:data/train-0.parquet"
        ran("reproduce", out)  # ends with 1 where bytes differ
        measured = ran("eval", "tiny", "--text", text, "--windows", "1", "--length", "64")
        assert measured["protocol"]["text"] == text
        own = ran("eval", "tiny", "--text", str(test), "--windows", "1", "--length", "64")
        assert measured["perplexity"] == own["perplexity"]
        few = ("--text", text, "--windows", "1", "--length", "64")
        ran("compare", out, "--against", "tiny", *few)
        ran("report", out, "--against", "tiny", *few)
        for name, why in ((text + "x", "has no file 'data/test-0.parquetx'"), ("ann/x", "no such")):
            result = CliRunner().invoke(app, ["eval", "tiny", "--text", name])
            assert result.exit_code == 1 and why in str(result.exception)
        (folder / "more.parquet").write_bytes(b"")
        before = hub.sent.copy()
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(sys.modules, "pyarrow", None)
            words = ["eval", "tiny", "--text", "ann/texts:data/more.parquet"]
            result = CliRunner().invoke(app, words)
        assert "more.parquet: is read by pyarrow" in str(result.exception)
        assert hub.sent == before  # not downloaded
        log_in = "is gated: accept its terms on its page .*/datasets/ann/gated.*, then log in with"
        for given, said in (
            ("ann/gated:a.txt", log_in),
            ("ann/gated", log_in),
            ("ann/textz:a.txt", "does not exist, or is private; .* log in with"),
            ("ann/texts:data", r"no file 'data'; name one, such as data/more.parquet, data/test-0"),
            ("ann/texts:data/tset-0.txt", r"no file .*; name one, such as data/test-0.parquet"),
            ("ann/texts@gone:a.txt", "has no revision 'gone'"),
        ):
            with pytest.raises(SourceError, match=rf"^{given.partition(':')[0]}: dataset .*{said}"):
                load_text(given)
    here = tmp_path / "ann" / text[4:]
    here.parent.mkdir(parents=True)
    here.write_text("a text " * 200)
    monkeypatch.chdir(tmp_path)
    assert source.text_file(Path(text)) == Path(text)
