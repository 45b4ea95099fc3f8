"""One damaged or lying file for each way a header, an index or a config can lie, each refused in
one sentence that says where and what."""

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import FormatError, QtoolError, SourceError
from qtool.formats import safetensors_file as st
from qtool.scheme import Scheme
from support.formats.artifact_files import random_quant, write_folder
from support.hostile.row import entry


def file_of(header: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return size.to_bytes(8, "little") + text + data


W = {"w": entry()}
ONE = json.dumps(entry())

LIES: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "0 bytes are too few"),
    "seven bytes": (b"\0" * 7, "7 bytes are too few"),
    "header longer than the file": (file_of(W, length=10**6), "header is 1000000 bytes long"),
    "header of 2^64 - 1": (file_of(W, length=2**64 - 1), "header is 18446744073709551615"),
    "header cut short": (file_of(W, length=20), "not valid JSON"),
    "a GGUF file": (b"GGUF\3\0\0\0" + bytes(64), "a GGUF file, whatever its name is"),
    "no header": (file_of(b""), "does not begin with"),
    "a zip file": (file_of(b"PK\x03\x04" + bytes(60)), "does not begin with"),
    "not UTF-8": (file_of(b'{"\xff\xfe": 1}'), "not valid JSON"),
    "not JSON": (file_of(b"{w: 1}"), "not valid JSON"),
    "nested too deeply": (file_of(b'{"w":' + b"[" * 10_000), "nested too deeply"),
    "a number of a million digits": (
        file_of(b'{"w":{"dtype":"F32","shape":[' + b"9" * 10**6 + b'],"data_offsets":[0,8]}}'),
        "not valid JSON",
    ),
    "a name twice": (file_of(f'{{"w":{ONE},"w":{ONE}}}'.encode()), "'w' comes twice"),
    "a key twice": (
        file_of(b'{"w":{"dtype":"F32","dtype":"F64","shape":[2],"data_offsets":[0,8]}}'),
        "'dtype' comes twice",
    ),
    "an entry that is no object": (file_of({"w": 5}), "needs exactly dtype"),
    "an entry without offsets": (file_of({"w": {"dtype": "F32", "shape": [2]}}), "needs exactly"),
    "an entry with more": (file_of({"w": entry() | {"x": 1}}), "needs exactly dtype"),
    "unknown dtype": (file_of({"w": entry("F33")}), "unknown dtype 'F33'"),
    "a dtype that is a list": (file_of({"w": entry(["F32"])}), "unknown dtype"),
    "negative shape": (file_of({"w": entry(shape=[-2])}), r"shape \[-2\]"),
    "two negative sizes": (file_of({"w": entry(shape=[-1, -2])}), r"shape \[-1, -2\]"),
    "fractional shape": (file_of({"w": entry(shape=[2.0])}), r"shape \[2.0\]"),
    "a truth value as size": (file_of({"w": entry(shape=[True, 2])}), r"shape \[True, 2\]"),
    "a shape that is text": (file_of({"w": entry(shape="2")}), "shape '2'"),
    "a thousand dimensions": (file_of({"w": entry(shape=[1] * 1000)}), "1000 dimensions"),
    "a shape too large": (file_of({"w": entry(shape=[2**62, 2**62])}), "needs 850705917"),
    "shape and bytes disagree": (file_of({"w": entry(shape=[3])}), "needs 12 bytes"),
    "end before begin": (file_of({"w": entry(offsets=[8, 0])}), "ends at 0, before"),
    "negative offset": (file_of({"w": entry(offsets=[-8, 0])}), "data_offsets"),
    "three offsets": (file_of({"w": entry(offsets=[0, 4, 8])}), "data_offsets"),
    "offsets beyond the file": (file_of({"w": entry(offsets=[0, 8])}, bytes(7)), "truncated"),
    "offsets of 2^63": (file_of({"w": entry(offsets=[2**63, 2**63 + 8])}), "data_offsets .9223"),
    "overlap": (
        file_of({"v": entry(offsets=[0, 8]), "w": entry(offsets=[4, 12])}, bytes(12)),
        "'w' begins at byte .* overlaps",
    ),
    "two tensors in one place": (
        file_of({"v": entry(), "w": entry()}),
        "overlaps",
    ),
    "a gap": (file_of({"w": entry(offsets=[8, 16])}, bytes(16)), "'w' begins .* leaves a gap"),
    "bytes of no tensor": (file_of(W, bytes(9)), "1 bytes follow the last tensor"),
    "metadata that is text": (file_of(W | {"__metadata__": "x"}), "must map strings to strings"),
    "metadata with numbers": (file_of(W | {"__metadata__": {"a": 1}}), "must map strings"),
    "nothing but metadata": (file_of({"__metadata__": {}}, b""), "holds no tensors"),
}


@pytest.mark.parametrize("lie", list(LIES))
def test_a_header_that_lies(tmp_path: Path, lie: str) -> None:
    content, sentence = LIES[lie]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises((FormatError, SourceError), match=sentence) as caught:
        Checkpoint.open(tmp_path)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 1000
    assert str(tmp_path) in text


def test_the_honest_file_is_read(tmp_path: Path) -> None:
    # So that the lies above are refused for what they say, and not for how they are made.
    (tmp_path / "model.safetensors").write_bytes(file_of(W))
    assert Checkpoint.open(tmp_path).float32("w").tolist() == [0.0, 0.0]


def test_a_huge_sparse_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((10**12).to_bytes(8, "little") + b"{")
        file.truncate(10**12 + 8)
    with pytest.raises(FormatError, match="at most 100000000 are read"):
        Checkpoint.open(path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    write_folder(tmp_path, "gptq", {"a": random_quant(Scheme(4, 32, True), 8, 32)})
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for size in {*range(16), *range(16, len(whole), 31), len(whole) - 1}:
        path.write_bytes(whole[:size])
        with pytest.raises(QtoolError):
            Checkpoint.open(tmp_path)


def test_a_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(file_of(W))
    checkpoint = Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 60)
    with pytest.raises(FormatError, match="bytes early"):
        checkpoint.raw("w")


def flipped(seed: int, content: bytes) -> bytes:
    rng = np.random.default_rng(seed)
    raw = np.frombuffer(content, np.uint8).copy()
    at = rng.integers(0, len(raw), 3)
    raw[at] = rng.integers(0, 256, 3)
    return raw.tobytes()


def test_random_damage_gives_a_sentence_or_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    folder.mkdir()
    write_folder(folder, "gptq", {"a": random_quant(Scheme(4, 32, True), 8, 32)})
    whole = (folder / "model.safetensors").read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for seed in range(150):
        (folder / "model.safetensors").write_bytes(flipped(seed, whole[:head]) + whole[head:])
        try:
            artifact = Artifact.open(folder)
            for name in artifact.entries:
                artifact.read(name)
        except QtoolError:
            refused += 1
    assert refused > 110


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        (b"[]", "expected a JSON object, found a list"),
        (b"{}", "has no weight_map"),
        (b'{"weight_map": {}}', "has no weight_map"),
        (b'{"weight_map": {"w": 3}}', "'w' is 3, not a name"),
        (b'{"weight_map": {"w": "../x.safetensors"}}', "leads out of the folder"),
        (b'{"weight_map": {"w": "/etc/x.safetensors"}}', "leads out of the folder"),
        (b'{"weight_map": {"w": "a/../../x.safetensors"}}', "leads out of the folder"),
        (b'{"weight_map": {"w": "..\\\\x.safetensors"}}', "leads out of the folder"),
        (b'{"weight_map": {"w": ""}}', "leads out of the folder"),
        (b'{"weight_map": {"w": "x.safetensors\\u0000"}}', "leads out of the folder"),
        (b'{"weight_map": {"w": "x.bin"}}', "pickle"),
        (b'{"weight_map": {"w": "x.txt"}}', "no safetensors file"),
        (b'{"weight_map": {"w": "absent.safetensors"}}', "absent.safetensors: named by"),
        (b'{"weight_map": {"v": "x.safetensors"}}', "lacks 'v'"),
        (b'{"weight_map": {"w": "x.safetensors", "w": "x.safetensors"}}', "'w' comes twice"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, index: bytes, sentence: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(file_of(W))
    (tmp_path / st.INDEX_NAME).write_bytes(index)
    with pytest.raises(QtoolError, match=sentence):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("content", [b"", b"null", b"[" * 100_000, b"\xff", b'{"a": 1, "a": 2}'])
def test_a_config_that_is_no_config(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(file_of(W))
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(FormatError, match=r"config\.json"):
        Checkpoint.open(tmp_path)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("awq", {"bits": 8}, "4 bits only"),
        ("awq", {"group_size": 1 << 40}, "group_size is"),
        ("awq", {"group_size": 48}, "not divisible by the group size 48"),
        ("awq", {"group_size": 16}, r"a.qzeros: the shape is \[2, 1\]; expected \[4, 1\]"),
        ("awq", {"version": "gemv"}, "in_features 8 is not divisible"),
        ("awq", {"bits": 10**30}, "bits is"),
        ("gptq", {"bits": "many"}, 'bits is "many"'),
        ("gptq", {"bits": 99}, "bits is 99"),
    ],
)
def test_a_quantization_config_that_lies(
    tmp_path: Path, kind: str, changes: dict[str, Any], sentence: str
) -> None:
    write_folder(tmp_path, kind, {"a": random_quant(Scheme(4, 32, True), 8, 64)})
    change_config(tmp_path, **changes)
    with pytest.raises(FormatError, match=sentence):
        assert Artifact.open(tmp_path).entries
        raise AssertionError("opened")


Change = Callable[[dict[str, np.ndarray]], None]


def drop_scales(tensors: dict[str, np.ndarray]) -> None:
    del tensors["a.scales"]


def floats_for_codes(tensors: dict[str, np.ndarray]) -> None:
    tensors["a.qweight"] = tensors["a.qweight"].astype(np.float32)


def dense_too(tensors: dict[str, np.ndarray]) -> None:
    tensors["a.weight"] = np.zeros((8, 64), np.float16)


def huge_g_idx(tensors: dict[str, np.ndarray]) -> None:
    tensors["a.g_idx"] = np.zeros(1 << 20, np.int32)


def wild_g_idx(tensors: dict[str, np.ndarray]) -> None:
    tensors["a.g_idx"][3] = 1 << 30


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (drop_scales, "a.scales: missing"),
        (floats_for_codes, "a.qweight: the dtype is F32"),
        (dense_too, "a.weight is there both packed and dense"),
        (huge_g_idx, "fit no width"),
        (wild_g_idx, "outside of 0 .. 1"),
    ],
)
def test_stored_tensors_that_lie(tmp_path: Path, change: Change, sentence: str) -> None:
    from safetensors.numpy import load_file, save_file

    write_folder(tmp_path, "gptq", {"a": random_quant(Scheme(4, 32, True), 8, 64)})
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    artifact = Artifact.open(tmp_path)
    with pytest.raises(FormatError, match=sentence):
        artifact.read("a")


def test_reading_a_lie_takes_no_memory(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (tmp_path / "model.safetensors").write_bytes(
        file_of({"w": entry(shape=[2**40], offsets=[0, 2**42])})
    )
    with pytest.raises(FormatError, match="truncated"):
        Checkpoint.open(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
