"""The table of hostile files: each given to a command, which says one sentence and writes nothing.

GGUF files have their own tables (test_gguf_hostile*.py), and so have the headers that are given to
the reader itself (test_hostile.py).
"""

import contextlib
import json
import re
import shutil
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from qtool.errors import FormatError
from qtool.formats import safetensors_header
from qtool.formats.gguf_writer import lay_out
from qtool.gguf.from_hf.general import general_metadata
from qtool.texts import source as texts
from qtool.workspaces.journal import Journal
from support.hostile import (
    configs,
    headers,
    journals,
    measurements,
    recipes,
    records,
    row,
    servers,
    tokenizers,
)
from support.hostile.journals import Left
from support.hostile.row import Row
from support.hostile.servers import Lie
from support.hub import range_server
from support.hub.range_server import RangeServer
from support.runs import quantizing
from support.runs.quantizing import Call, Called

TABLES = {
    "header": headers.HEADERS,
    "index": headers.INDEXES,
    "link": headers.LINKS,
    "config": configs.CONFIGS,
    "tokenizer": tokenizers.TOKENIZERS,
    "recipe": recipes.RECIPES,
    "stats": measurements.STATS,
    "text": measurements.TEXTS,
    "record": records.RECORDS,
    "matrix": records.MATRICES,
}
ROWS = [
    pytest.param(one, id=f"{kind}: {one.name}") for kind, some in TABLES.items() for one in some
]
SECONDS = 1.0
KEPT = "what is finished is kept ("


@pytest.fixture(scope="module", autouse=True)
def _models() -> Iterator[None]:
    yield
    row.forget()


def there(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if not path.is_symlink()
    }


def assert_one_sentence(said: Called, says: str, status: int = 1) -> None:
    assert said.status == status, said
    lines = [line for line in said.err.splitlines() if not line.startswith(KEPT)]
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and lines[-1] == errors[0], said.err
    assert re.search(says, errors[0]), errors[0]
    assert len(errors[0]) < 2200 and errors[0].isprintable()
    assert "Traceback" not in said.err and "panicked" not in said.err


@pytest.mark.parametrize("one", ROWS)
def test_a_hostile_file(
    one: Row, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = one.make(tmp_path)
    if command[0] in ("quantize", "calibrate"):
        _import()
        # What a model is tried out on, if nothing else is named, is as long as a book.
        monkeypatch.setattr(texts, "default_text", lambda: "the and in " * 400)
    before = there(tmp_path)
    start = time.process_time()
    said = call(*command)
    took = time.process_time() - start
    assert_one_sentence(said, one.says, one.status)
    assert said.out == ""
    assert there(tmp_path) == before
    assert took < SECONDS


def _import() -> None:
    """What a command imports is not its work."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    import qtool.blockwise.run
    import qtool.quantizing.gguf.quantize  # noqa: F401


def test_there_are_enough() -> None:
    assert len(ROWS) >= 100 and len({one.id for one in ROWS}) == len(ROWS)


@pytest.fixture(scope="module")
def running() -> Iterator[RangeServer]:
    with range_server.serve({}) as server:
        yield server


@pytest.mark.parametrize("lie", [pytest.param(one, id=one.name) for one in servers.LIES])
def test_a_hostile_server(
    lie: Lie, running: RangeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: Call
) -> None:
    from huggingface_hub import constants

    for key in ("http_proxy", "HTTP_PROXY", "HF_TOKEN"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", running.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("time.sleep", lambda _: None)  # before a second attempt
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RangeServer, "handle_error", lambda *_: None)  # who hangs up early
    running.files.clear()
    running.answers.clear()
    lie.tell(running)
    start = time.process_time()
    address = lie.address if "://" in lie.address else f"{running.url}/{lie.address}"
    said = call("inspect", address)
    assert_one_sentence(said, lie.says)
    assert said.out == "" and there(tmp_path) == {}
    assert "/tmp" not in said.err and time.process_time() - start < SECONDS


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model m, a finished output `whole`, and what a run killed half way left."""
    folder = tmp_path_factory.mktemp("unfinished")
    row.honest(folder)
    with pytest.MonkeyPatch.context() as patch:
        commit, done = Journal.commit, 0

        def dying(journal: Journal, name: str, **content: object) -> None:
            nonlocal done
            done += 1
            if done > 2:
                raise KeyboardInterrupt
            commit(journal, name, **content)

        run_rtn(folder, "whole")
        patch.setattr(Journal, "commit", dying)
        with pytest.raises(KeyboardInterrupt):
            run_rtn(folder, "out")
    assert (folder / ".out.partial" / "journal").is_file()
    return folder


def run_rtn(folder: Path, out: str) -> None:
    quantizing.quantize(folder / "m", "w4g128-rtn", folder / out, "weights.group_size=32")


@pytest.mark.parametrize("left", [pytest.param(one, id=one.name) for one in journals.LEFT])
def test_a_hostile_journal(left: Left, unfinished: Path, tmp_path: Path, call: Call) -> None:
    folder = tmp_path / "f"
    shutil.copytree(unfinished, folder)  # times too, which tell one source from another
    left.change(folder / ".out.partial")
    kept = there(folder)
    said = call("quantize", folder / "m", "--recipe", "w4g128-rtn", "--set",
                "weights.group_size=32", "-o", folder / "out")  # fmt: skip
    if left.status:
        assert_one_sentence(said, left.says)
        assert there(folder) == kept
        return
    assert said.status == 0, said.err
    assert re.search(left.says, said.err, re.DOTALL), said.err
    assert there(folder / "out") == there(unfinished / "whole")
    assert not (folder / ".out.partial").exists()


CARDS = {
    "a bomb of aliases": recipes.BOMB,
    "a list without a bottom": "license: " + "[" * 30_000,
    "a date of no calendar": "license: mit\ndate: 2024-13-45",
    "a character beyond Unicode": 'license: "\\UFFFFFFFF"',
    "an object of Python": "license: !!python/object/apply:os.system ['touch ran']",
    "a licence that is a list of lists": "license: [[a, b], [c]]",
    "base models that are lists": "base_model: [[a], [b]]",
    "a name that is a mapping": "model_name: {a: {b: c}}",
    "two hundred thousand values": "tags: [" + "a," * 100_000 + "]",
    "half a megabyte": "license: " + "x" * 600_000,
    "a number of 5000 digits": "license: " + "9" * 5000,
    "no end": "license: 'mit",
}


@pytest.mark.parametrize("card", CARDS)
def test_a_hostile_card(card: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a card that cannot be read, nothing is taken over into the keys of a GGUF file."""
    import gguf  # noqa: F401

    (tmp_path / "README.md").write_text(f"---\n{CARDS[card]}\n---\n# A model\n")
    monkeypatch.chdir(tmp_path)
    start = time.process_time()
    made = general_metadata(tmp_path, {}, [])
    assert time.process_time() - start < SECONDS and not (tmp_path / "ran").exists()
    assert "general.name" in made and lay_out(made, []).header
    assert sum(len(str(value.value)) for value in made.values()) < 20_000


DENSE = {
    "empty lists": b"[],",
    "empty objects": b"{},",
    "objects of one": b'{"a":1},',
    "lists in lists": b"[[[[[]]]]],",
    "lists of one": b"[0],",
    "short texts": b'"ab",',
    "numbers": b"999,",
    "fractions": b"1e1,",
    "texts beyond ASCII": '"\u20ac\U0001f600",'.encode(),
}


@pytest.mark.parametrize("kind", [*DENSE, "keys", "keys of lists"])
def test_what_json_takes_is_known_before_it_is_read(kind: str) -> None:
    """So that a file which takes more than ten times its size, and 1 MiB, can be refused."""
    if kind in DENSE:
        data = b'{"a":[' + DENSE[kind] * (60_000 // len(DENSE[kind])) + b"0]}"
    else:
        value = b"[]" if kind == "keys of lists" else b"1"
        data = b"{" + b",".join(b'"%x":%s' % (n, value) for n in range(6000)) + b"}"
    tracemalloc.start()
    try:
        safetensors_header.parse_json(data, "x", margin=1 << 27)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < safetensors_header._json_bytes(data) * 1.1


@pytest.mark.parametrize("kind", DENSE)
def test_no_json_takes_more_than_ten_times_its_size(kind: str) -> None:
    """And 1 MiB, of which a long text shows nothing; only a tokenizer may take more."""
    data = b'{"a":[' + DENSE[kind] * (2_000_000 // len(DENSE[kind])) + b"0]}"
    tracemalloc.start()
    try:
        with contextlib.suppress(FormatError):
            safetensors_header.parse_json(data, "x")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * len(data) + (1 << 20)


def test_json_of_models_is_read() -> None:
    """Headers with thousands of scalars, settings for each tensor, words and pairs of a tokenizer:
    each as dense as published ones are, and larger than the margin hides."""
    names = [f"model.layers.{n // 768}.mlp.experts.{n % 256}.up_proj" for n in range(20_000)]
    header = {
        f"{name}.weight_scale{n}": {"dtype": "F32", "shape": [], "data_offsets": [n + 10**9, n + 1]}
        for n, name in enumerate(names)
    }
    settings = {f"{name}{n}": {"bits": 16, "data_type": "float"} for n, name in enumerate(names)}
    for found in (header, settings):
        data = json.dumps(found, separators=(",", ":")).encode()
        assert safetensors_header.parse_json(data, "x") == found
    pairs = json.dumps({"merges": [["ab", "c"]] * 200_000}, separators=(",", ":")).encode()
    with pytest.raises(FormatError, match="JSON so dense"):
        safetensors_header.parse_json(pairs, "x")
    assert safetensors_header.parse_json(pairs, "x", safetensors_header.TOKENIZER_MARGIN)
    with pytest.raises(FormatError, match="JSON so dense"):  # would take 12 times its bytes
        safetensors_header.parse_json(b'{"a":[' + b"999," * 250_000 + b"0]}", "x")
