"""Files of importance matrices: by hand, by other people's reader, and such as lie."""

import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from numpy.typing import NDArray

import qtool.tiny
from qtool.errors import QtoolError, SourceError
from qtool.formats.gguf_values import Kind, Value, array, string, strings, u32
from qtool.formats.gguf_writer import GgufWriter, TensorSpec, lay_out
from qtool.gguf.importance.imatrix import Importance, read_importance, write_importance
from qtool.gguf_types import F16, F32

Q, DOWN = "blk.0.attn_q.weight", "blk.0.ffn_down_exps.weight"


KEYS = {
    "general.type": string("imatrix"),
    "imatrix.datasets": strings(["a.txt"]),
    "imatrix.chunk_count": u32(5),
    "imatrix.chunk_size": u32(512),
}


def example() -> Importance:
    """One matrix, and three experts of which the middle one was never reached."""
    sums = {
        DOWN: np.array([[1, 2], [0, 0], [5, 7]], np.float32),
        Q: np.array([[10, 0.1, 3]], np.float32),
    }
    counts = {DOWN: np.array([3, 0, 7]), Q: np.array([10])}
    return Importance(sums, counts, ("a.txt",), 5, 512)


def test_the_bytes_of_a_file_by_hand(tmp_path: Path) -> None:
    """Keys and name-sorted tensors as llama-imatrix has them; axes of one are dropped."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def padded(data: bytes) -> bytes:
        return data + bytes(-len(data) % 32)

    def info(name: str, ne: list[int], offset: int) -> bytes:
        return text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, 0, offset)

    header = b"GGUF" + struct.pack("<IQQ", 3, 4, 4)
    header += text("general.type") + struct.pack("<I", 8) + text("imatrix")
    header += text("imatrix.datasets") + struct.pack("<IIQ", 9, 8, 1) + text("a.txt")
    header += text("imatrix.chunk_count") + struct.pack("<II", 4, 5)
    header += text("imatrix.chunk_size") + struct.pack("<II", 4, 512)
    header += info(Q + ".in_sum2", [3], 0) + info(Q + ".counts", [1], 32)
    header += info(DOWN + ".in_sum2", [2, 3], 64) + info(DOWN + ".counts", [1, 3], 96)
    data = padded(struct.pack("<3f", 10, 0.1, 3)) + padded(struct.pack("<f", 10))
    data += padded(struct.pack("<6f", 1, 2, 0, 0, 5, 7)) + padded(struct.pack("<3f", 3, 0, 7))
    path = tmp_path / "imatrix.gguf"
    write_importance(path, example())
    assert path.read_bytes() == padded(header) + data
    assert [one.name for one in tmp_path.iterdir()] == ["imatrix.gguf"]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.gguf"
    write_importance(path, example())
    found = read_importance(path)
    assert (found.datasets, found.chunks, found.chunk_size) == (("a.txt",), 5, 512)
    assert found.file == "imatrix.gguf" and found.unmeasured == ()
    for mine, its in ((example().sums, found.sums), (example().counts, found.counts)):
        assert mine.keys() == its.keys()
        assert all(np.array_equal(value, its[name]) for name, value in mine.items())
    theirs = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    assert list(theirs) == [Q + ".in_sum2", Q + ".counts", DOWN + ".in_sum2", DOWN + ".counts"]
    assert np.array_equal(theirs[DOWN + ".in_sum2"], example().sums[DOWN])
    assert np.array_equal(theirs[DOWN + ".counts"], [[3], [0], [7]])


def test_entries_are_means_in_float32() -> None:
    """One rounded division each, and 1 where there is nothing to divide."""
    found = example()
    assert set(found.entries) == {Q, DOWN} and len(found.entries) == 2
    assert found.entries[Q].dtype == np.float32
    assert found.entries[Q].tolist() == [[1.0, np.float32(0.1) / np.float32(10), np.float32(0.3)]]
    third, seventh = np.float32(1) / np.float32(3), np.float32(5) / np.float32(7)
    expected = [[third, np.float32(2) / np.float32(3)], [1.0, 1.0], [seventh, 1.0]]
    assert found.entries[DOWN].tolist() == expected
    with pytest.raises(KeyError):
        found.entries["blk.1.attn_q.weight"]


def test_experts_without_tokens_are_told() -> None:
    found = example()
    assert found.unreached == {DOWN: (1,)}
    assert not found.notes(there={Q})
    (note,) = found.notes()
    assert f"{DOWN}: 1" in note and "weigh 1" in note and "more calibration text" in note
    assert found.record()["unreached"] == {DOWN: [1]}
    many = {f"blk.{i}.x.weight": np.zeros((12, 1), np.float32) for i in range(5)}
    counts = {name: np.zeros(12, np.int64) for name in many}
    (note,) = Importance(many, counts).notes()
    assert "0, 1, 2, 3, 4, 5, 6, 7 and 4 more" in note and "in 2 more tensors" in note


def test_tensors_without_an_entry_are_told() -> None:
    """What llama-quantize says among its thousand lines, if at all."""
    assert len(replace(example(), file="a.gguf").notes()) == 1
    *_, note = replace(example(), file="a.gguf").notes([f"blk.{i}.attn_k.weight" for i in range(5)])
    assert note.startswith("a.gguf has nothing of blk.0.attn_k.weight, blk.1.attn_k.weight, ")
    assert "and 2 more; without it all columns" in note


def test_counts_are_rounded_as_lround_does(tmp_path: Path) -> None:
    counts = np.array([[0.4], [0.5], [2.5], [3.5]], np.float32)
    path = stored(tmp_path, tensors={"a.in_sum2": np.ones((4, 2), np.float32), "a.counts": counts})
    assert read_importance(path).counts["a"].tolist() == [0, 1, 3, 4]


def stored(
    folder: Path,
    metadata: Mapping[str, Value] = KEYS,
    tensors: Mapping[str, NDArray[Any]] | None = None,
) -> Path:
    """A GGUF file with these keys and tensors."""
    if tensors is None:
        tensors = {"a.in_sum2": np.ones((1, 2), np.float32), "a.counts": np.ones(1, np.float32)}
    kinds = {"float32": F32, "float16": F16}
    specs = [TensorSpec(name, t.shape, kinds[t.dtype.name]) for name, t in tensors.items()]
    path = folder / "stored.gguf"
    with open(path, "wb") as file:
        writer = GgufWriter(file.fileno(), lay_out(metadata, specs))
        for number, (spec, values) in enumerate(zip(specs, tensors.values(), strict=True)):
            writer.rows(number, 0, values.reshape(spec.rows, -1).view(np.uint8))
        writer.finish()
    return path


def test_a_file_of_another_program_is_read(tmp_path: Path) -> None:
    """Other tensors and keys do not matter, nor does the order."""
    one = np.ones(1, np.float32)
    tensors = {"b.counts": one, "a.counts": one, "x": one, "a.in_sum2": one, "b.in_sum2": 2 * one}
    found = read_importance(stored(tmp_path, KEYS | {"general.name": string("n")}, tensors))
    assert list(found.sums) == ["a", "b"] and found.entries["b"].tolist() == [[2.0]]
    assert found.extra == {}


ONE = np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("keys", "tensors", "said"),
    [
        ({"general.type": string("model")}, {}, "of general.type 'model', not an importance"),
        ({}, {"a.weight": ONE}, "no tensors named"),
        ({"general.type": None}, {}, "no general.type"),
        ({"imatrix.chunk_count": None}, {}, "lacks 'imatrix.chunk_count'"),
        ({"imatrix.chunk_size": string("512")}, {}, "chunk_size' is of kind STRING, expected"),
        ({"imatrix.datasets": string("a")}, {}, "expected an array of strings"),
        ({"imatrix.datasets": array(Kind.INT32, [1])}, {}, "expected an array of strings"),
        ({}, {"b.in_sum2": ONE}, "'b.in_sum2' without 'b.counts'"),
        ({}, {"b.counts": ONE}, "'b.counts' without 'b.in_sum2'"),
        ({}, {"a.counts": ONE.astype(np.float16)}, "'a.counts' is F16, expected F32"),
        ({}, {"a.counts": np.ones(3, np.float32)}, "2 values for 3 counts"),
        ({}, {"a.in_sum2": np.full(2, np.nan, np.float32)}, "not finite"),
        ({}, {"a.counts": np.full(1, np.inf, np.float32)}, "not finite"),
        ({}, {"a.in_sum2": np.full(2, -1, np.float32)}, "negative"),
        ({}, {"a.counts": -ONE}, "negative"),
        ({}, {"a.counts": np.full(1, 1e20, np.float32)}, "a number of tokens"),
    ],
)
def test_files_that_lie_are_refused(
    keys: Mapping[str, Value | None], tensors: dict[str, NDArray[Any]], said: str, tmp_path: Path
) -> None:
    metadata = {key: value for key, value in (KEYS | keys).items() if value is not None}
    whole = {"a.in_sum2": np.ones((1, 2), np.float32), "a.counts": ONE} | tensors
    if "a.weight" in tensors:
        whole = tensors
    path = stored(tmp_path, metadata, whole)
    with pytest.raises(QtoolError, match=said) as caught:
        read_importance(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def entry(name: bytes, calls: int, values: list[float]) -> bytes:
    """One of a .dat."""
    head = struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, len(values))
    return head + struct.pack(f"<{len(values)}f", *values)


DAT = struct.pack("<i", 2) + entry(b"blk.0.b", 3, [1, 2]) + entry(b"blk.0.a", 0, [5])


@pytest.mark.parametrize(
    ("end", "chunks", "datasets"),
    [
        (b"", 0, ()),
        (struct.pack("<i", 7), 7, ()),
        (struct.pack("<ii", 7, 0), 7, ()),
        (struct.pack("<ii", 7, 5) + b"x.txt", 7, ("x.txt",)),
    ],
)
def test_dat(end: bytes, chunks: int, datasets: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(DAT + end)
    found = read_importance(path)
    assert (found.chunks, found.datasets, found.file) == (chunks, datasets, "imatrix.dat")
    third = np.float32(1) / np.float32(3)
    assert found.entries["blk.0.b"].tolist() == [[third, np.float32(2) / np.float32(3)]]
    assert found.entries["blk.0.a"].tolist() == [[5.0]]  # never called: taken as it is
    assert found.unreached == {}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "neither of llama.cpp's layouts"),
        (struct.pack("<Q", 64) + b'{"x":', "a safetensors file; expected an importance matrix"),
        (b"\1\0\0", "neither of llama.cpp's layouts"),
        (struct.pack("<i", 0), "neither of llama.cpp's layouts"),
        (struct.pack("<i", -1) + DAT, "neither of llama.cpp's layouts"),
        (struct.pack("<i", 1 << 30) + DAT[4:], "neither of llama.cpp's layouts"),
        (b"this is a text, and not an importance matrix", "neither of llama.cpp's layouts"),
        (struct.pack("<i", 3) + DAT[4:], "4 bytes and 0 are left"),
        (DAT[:-1], "entry 'blk.0.a' takes 4 bytes and 3 are left"),
        (DAT[:38], "the name of entry 1 takes 7 bytes and 3 are left"),
        (
            struct.pack("<i", 1) + entry(b"", 1, [1.0] * 9),
            "length of the name of entry 0: 0, expected 1",
        ),
        (struct.pack("<ii", 1, -5) + DAT, "length of the name of entry 0: -5, expected 1"),
        (struct.pack("<ii", 1, 1 << 30) + DAT, "expected 1 to 1024"),
        (struct.pack("<ii", 1, 1000) + DAT, "1000 bytes and"),
        (struct.pack("<i", 1) + entry(b"\xff\xfe", 1, [1.0]), "is not UTF-8"),
        (struct.pack("<i", 1) + entry(b"a\0b", 1, [1.0]), "null character"),
        (struct.pack("<i", 2) + 2 * entry(b"aaaa", 1, [1.0]), "'aaaa' comes twice"),
        (struct.pack("<i", 1) + entry(b"aaaa", -1, [1.0]), "calls of 'aaaa': -1"),
        (struct.pack("<i", 1) + entry(b"aaaa", 1, []) + DAT, "values of 'aaaa': 0"),
        (
            struct.pack("<ii4sii", 1, 4, b"aaaa", 1, (1 << 31) - 1),
            "takes 8589934588 bytes and 0 are left",
        ),
        (struct.pack("<i", 1) + entry(b"aaaa", 1, [float("nan")]), "not finite"),
        (struct.pack("<i", 1) + entry(b"aaaa", 1, [-1.0]), "negative"),
        (DAT + b"\1\2", "the number of chunks takes 4 bytes and 2 are left"),
        (DAT + struct.pack("<ii", 1, 1 << 30), "expected 0 to 65536"),
        (DAT + struct.pack("<ii", 1, 9) + b"short", "9 bytes and 5 are left"),
        (DAT + struct.pack("<ii", 1, 1) + b"ab", "after its end, for 1 bytes"),
    ],
)
def test_dat_files_that_lie_are_refused(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(data)
    with pytest.raises(QtoolError, match=said) as caught:
        read_importance(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "pipe", "."):
        with pytest.raises(SourceError, match=r"cannot be read|not a file"):
            read_importance(tmp_path / name)
    model = Path(qtool.tiny.__file__).parent / "model.safetensors"
    with pytest.raises(
        QtoolError, match=r"model\.safetensors: a safetensors file; expected an importance"
    ):
        read_importance(model)


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match="cannot be made"):
        write_importance(Path(os.devnull) / "folder" / "a", example())
    long = example().sums | {"x" * 60: np.ones((1, 2), np.float32)}
    with pytest.raises(QtoolError, match="its name has"):
        write_importance(
            tmp_path / "a", Importance(long, dict.fromkeys(long, np.ones(1, np.int64)))
        )
    assert list(tmp_path.iterdir()) == []


def test_no_file_of_the_user_is_touched(tmp_path: Path) -> None:
    """Neither one of that name, nor one that looks like a file in the making."""
    (tmp_path / "a.partial").write_text("mine")
    write_importance(tmp_path / "a", example())
    whole = (tmp_path / "a").read_bytes()
    with pytest.raises(QtoolError, match="exists"):
        write_importance(tmp_path / "a", replace(example(), chunks=6))
    assert (tmp_path / "a").read_bytes() == whole
    assert {file.name for file in tmp_path.iterdir()} == {"a", "a.partial"}
    assert (tmp_path / "a.partial").read_text() == "mine"
    write_importance(tmp_path / "no" / "folder" / "a", example())
    assert (tmp_path / "no" / "folder" / "a").read_bytes() == whole


def test_reading_needs_no_torch() -> None:
    import subprocess

    code = "import sys, qtool.gguf.importance.imatrix; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
