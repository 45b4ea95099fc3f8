"""Reading GGUF: what the gguf package writes comes back as it was, and as its own reader has it."""

import itertools
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from qtool.errors import FormatError, SourceError
from qtool.formats.gguf_arrays import StoredArray
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_values import STRUCT, Kind, Value
from qtool.gguf.from_gguf import gguf_source
from qtool.gguf_types import BY_NAME, TENSOR_TYPES
from support.gguf.gguf_bytes import Gguf, array, entry, info
from support.gguf.gguf_split import split

SCALARS: dict[Kind, list[Any]] = {
    Kind.UINT8: [0, 255],
    Kind.INT8: [-128, 127],
    Kind.UINT16: [0, 65535],
    Kind.INT16: [-32768, 32767],
    Kind.UINT32: [0, 2**32 - 1],
    Kind.INT32: [-(2**31), 2**31 - 1],
    Kind.FLOAT32: [0.0, -1.5, float("inf")],
    Kind.BOOL: [False, True],
    Kind.STRING: ["", "a b", "Ġthe", "中文 🙂", "line\nbreak\0null"],
    Kind.UINT64: [0, 2**64 - 1],
    Kind.INT64: [-(2**63), 2**63 - 1],
    Kind.FLOAT64: [1e300, -0.1],
}


PACKAGE_TYPE = {kind: gguf.GGUFValueType(int(kind)) for kind in Kind}


def written_by_package(path: Path) -> Path:
    """All kinds of values, alone and in arrays, and a tensor of each plain and block type."""
    writer = gguf.GGUFWriter(path, "llama")
    for kind, values in SCALARS.items():
        for number, value in enumerate(values):
            writer.add_key_value(f"one.{kind.name}.{number}", value, PACKAGE_TYPE[kind])
        writer.add_key_value(
            f"many.{kind.name}", values, gguf.GGUFValueType.ARRAY, sub_type=PACKAGE_TYPE[kind]
        )
    random = np.random.default_rng(7)
    for dtype in (np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64):
        name = f"plain.{np.dtype(dtype).name}"
        writer.add_tensor(name, (100 * random.standard_normal((3, 5))).astype(dtype))
    writer.add_tensor("of.one.axis", np.arange(7, dtype=np.float32))
    writer.add_tensor("of.four.axes", random.standard_normal((2, 3, 4, 32)).astype(np.float32))
    for block in BY_NAME.values():
        if block.number in set(gguf.GGMLQuantizationType):
            raw = random.integers(0, 256, (4, 2 * block.nbytes), dtype=np.uint8)
            kind = gguf.GGMLQuantizationType(block.number)
            writer.add_tensor(f"block.{block.name}", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_by_package(tmp_path_factory.mktemp("packaged") / "model.gguf")


def test_values_of_all_kinds(packaged: Path) -> None:
    with GgufFile.open(packaged) as file:
        for kind, values in SCALARS.items():
            for number, value in enumerate(values):
                found = file.metadata[f"one.{kind.name}.{number}"]
                assert found.kind is kind and found.element is None
                expected = np.float32(value) if kind is Kind.FLOAT32 else value
                assert found.value == expected and type(found.value) is type(value)
            many = file.metadata[f"many.{kind.name}"]
            assert many.kind is Kind.ARRAY and many.element is kind
            assert isinstance(many.value, StoredArray) and many.value.kind is kind
            assert list(many.value) == values and many.value == values
            assert many.value.first(2) == values[:2]


def test_same_as_the_reader_of_the_package(packaged: Path) -> None:
    theirs = gguf.GGUFReader(packaged)
    with GgufFile.open(packaged) as ours:
        assert ours.version == theirs.fields["GGUF.version"].parts[0][0] == 3
        assert ours.alignment == theirs.alignment
        keys = [name for name in theirs.fields if not name.startswith("GGUF.")]
        assert list(ours.metadata) == keys
        for key in keys:
            assert list(_listed(ours.metadata[key])) == list(_listed_theirs(theirs.fields[key]))
        assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
        for tensor in theirs.tensors:
            info_ = ours.tensors[tensor.name]
            assert info_.shape == tuple(reversed(tensor.shape.tolist()))
            assert info_.type.number == int(tensor.tensor_type)
            assert (info_.start, info_.nbytes) == (tensor.data_offset, tensor.n_bytes)
            rows = ours.read_rows(tensor.name, 0, info_.rows)
            assert rows.tobytes() == tensor.data.tobytes()


def _listed(value: Value) -> list[Any]:
    return list(value.value) if value.kind is Kind.ARRAY else [value.value]


def _listed_theirs(field: gguf.ReaderField) -> list[Any]:
    found = field.contents()
    return found if isinstance(found, list) else [found]


def test_every_type_has_the_packages_block_size() -> None:
    known = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    compared = [n for n in TENSOR_TYPES if n in known]
    assert len(compared) >= 30
    for number in compared:
        assert (TENSOR_TYPES[number].weights, TENSOR_TYPES[number].nbytes) == known[number]


@pytest.mark.parametrize("version", [2, 3])
def test_by_hand(tmp_path: Path, version: int) -> None:
    path = tmp_path / "m.gguf"
    weights = np.arange(8, dtype=np.float32)
    entries = [
        entry("general.architecture", Kind.STRING, "gpt2"),
        entry("general.alignment", Kind.UINT32, 64),
    ]
    infos = [info("b", [2, 4], offset=64), info("a", [3, 2], 1)]
    data = np.arange(6, dtype=np.float16).tobytes().ljust(64, b"\xff") + weights.tobytes()
    path.write_bytes(bytes(Gguf(entries, infos, data, version=version, alignment=64)))
    with GgufFile.open(path) as file:
        assert (file.version, file.alignment, file.files) == (version, 64, (path,))
        assert list(file.tensors) == ["b", "a"]  # as listed, not as they lie
        assert file.tensors["b"].start % 64 == 0 and file.tensors["b"].type.name == "F32"
        assert file.read_rows("b", 1, 2).view(np.float32).tolist() == [[4, 5, 6, 7]]
        assert file.read_rows("a", 0, 3).view(np.float16).tolist() == [[0, 1], [2, 3], [4, 5]]
        assert file.size_bytes == path.stat().st_size


def test_rows_into_a_buffer(packaged: Path) -> None:
    with GgufFile.open(packaged) as file:
        whole = file.read_rows("of.four.axes", 0, 24)
        assert whole.shape == (24, 128) and whole.dtype == np.uint8
        buffer = np.zeros((9, 128), np.uint8)
        assert file.read_rows("of.four.axes", 5, 12, buffer[1:8]).base is not None
        assert (buffer[1:8] == whole[5:12]).all() and not buffer[0].any() and not buffer[8].any()
        assert file.read_rows("of.four.axes", 3, 3).shape == (0, 128)
        for first, last in ((-1, 2), (3, 2), (0, 25)):
            with pytest.raises(ValueError, match="which has 24"):
                file.read_rows("of.four.axes", first, last)
        for wrong in (np.zeros((2, 64), np.uint8), np.zeros((2, 128), np.int8)):
            with pytest.raises(ValueError, match="expected contiguous uint8"):
                file.read_rows("of.four.axes", 0, 2, wrong)
        with pytest.raises(ValueError, match="expected contiguous uint8"):
            file.read_rows("of.four.axes", 0, 2, np.zeros((2, 256), np.uint8)[:, ::2])


def test_rows_from_many_threads(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    rows = np.arange(4096, dtype="<u4").repeat(16).reshape(4096, 16)
    path.write_bytes(bytes(Gguf(infos=[info("x", [4096, 16], 26)], data=rows.tobytes())))
    with GgufFile.open(path) as file, ThreadPoolExecutor(8) as pool:

        def check(first: int) -> bool:
            found = file.read_rows("x", first, first + 7).view("<u4")
            return bool((found == rows[first : first + 7]).all())

        assert all(pool.map(check, range(0, 4089)))


def test_strings_are_decoded_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tokens = [f"token {i}" for i in range(1000)] + ["", "é"]
    path.write_bytes(bytes(Gguf([array("t", Kind.STRING, tokens)])))
    with GgufFile.open(path) as file:
        stored = file.metadata["t"].value
    assert len(stored) == 1002  # the header outlives the descriptor
    assert stored.first(3) == tokens[:3] and stored._items is None
    assert list(itertools.islice(stored.raw_strings(), 2)) == [b"token 0", b"token 1"]
    assert stored[-1] == "é" and stored[5:7] == tokens[5:7] and stored._items is not None
    assert stored == tokens and stored != tokens[:-1] and stored != [*tokens[:-1], "e"]
    assert "".join(stored) == "".join(tokens)
    assert stored.stored == b"".join(
        struct.pack("<Q", len(t.encode())) + t.encode() for t in tokens
    )


def test_numbers_are_decoded_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(Gguf([array("n", Kind.INT16, range(-500, 500))])))
    with GgufFile.open(path) as file:
        stored = file.metadata["n"].value
    assert (stored[0], stored[-1], stored[499]) == (-500, 499, -1) and stored._items is None
    with pytest.raises(IndexError):
        stored[1000]
    with pytest.raises(IndexError):
        stored[-1001]
    assert stored == range(-500, 500) and stored == file.metadata["n"].value
    assert stored.stored == struct.pack("<1000h", *range(-500, 500))
    assert repr(stored) == "StoredArray(INT16[1000]: -500, -499, -498, ...)"


def test_equal_arrays_of_other_kinds_differ(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(Gguf([array("a", Kind.INT32, [1, 2]), array("b", Kind.UINT32, [1, 2])])))
    with GgufFile.open(path) as file:
        a, b = file.metadata["a"].value, file.metadata["b"].value
    assert a == [1, 2] == b and a != b and a != "ab"


def test_bytes_that_are_no_utf8_survive(tmp_path: Path) -> None:
    """Byte tokens and cut sequences come back byte for byte when encoded as they were decoded."""
    path = tmp_path / "m.gguf"
    tokens = [bytes([value]) for value in range(256)] + [
        b"\xe4\xb8",
        b"a\xff\xfeb",
        b"\xed\xb3\xbf",
    ]
    path.write_bytes(bytes(Gguf([array("t", Kind.STRING, tokens), entry("s", 8, b"\xff!")])))
    with GgufFile.open(path) as file:
        stored = file.metadata["t"].value
        assert file.metadata["s"].value.encode("utf-8", "surrogateescape") == b"\xff!"
    assert [token.encode("utf-8", "surrogateescape") for token in stored] == tokens
    assert list(stored.raw_strings()) == tokens


def test_long_header_is_read_in_pieces(tmp_path: Path) -> None:
    """Strings that end before, at and after the edges of what is read at once."""
    path = tmp_path / "m.gguf"
    edge = 1 << 20
    for shift in range(-20, 21):
        start = len(Gguf([b""], ()).header()) + len(array("t", Kind.STRING, []))
        first = edge - start - 8 + shift
        tokens = ["x" * first, "yy", "z" * 5, ""]
        path.write_bytes(bytes(Gguf([array("t", Kind.STRING, tokens), entry("k", 8, "v")])))
        with GgufFile.open(path) as file:
            assert file.metadata["t"].value == tokens and file.metadata["k"].value == "v"
            assert file.tensors["x"].shape == (2, 4)


def test_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No such file"):
        GgufFile.open(tmp_path / "none.gguf")
    with pytest.raises(SourceError, match="not a file; expected a"):
        GgufFile.open(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(SourceError, match="not a file"):
        GgufFile.open(tmp_path / "pipe.gguf")


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(Gguf()))
    with GgufFile.open(path) as file:
        os.truncate(path, path.stat().st_size - 1)
        assert file.read_rows("x", 0, 1).size == 16
        with pytest.raises(FormatError, match="ends inside tensor 'x'"):
            file.read_rows("x", 0, 2)


def test_source(packaged: Path, tmp_path: Path) -> None:
    with GgufFile.open(packaged) as file:
        source = gguf_source(file)
        assert source.architecture == "llama" and source.path == packaged
        assert [tensor.name for tensor in source.tensors] == list(file.tensors)
        for tensor in source.tensors:
            assert tensor.nbytes == file.tensors[tensor.name].nbytes
            last = tensor.rows
            assert (
                tensor.read(last - 1, last) == file.read_rows(tensor.name, last - 1, last)
            ).all()
        assert list(source.metadata) == list(file.metadata)
    files = split(tmp_path)
    with GgufFile.open(files[1]) as file:
        assert list(gguf_source(file).metadata) == ["general.architecture"]
    path = tmp_path / "imatrix.gguf"
    path.write_bytes(bytes(Gguf([entry("general.type", 8, "imatrix")])))
    with (
        GgufFile.open(path) as file,
        pytest.raises(SourceError, match="an importance matrix, which is"),
    ):
        gguf_source(file)
    path.write_bytes(
        bytes(Gguf([entry("general.file_type", 4, 1), entry("general.architecture", 8, "x")]))
    )
    with GgufFile.open(path) as file:
        assert list(gguf_source(file).metadata) == ["general.architecture"]


def test_kinds_and_numbers_are_ggufs() -> None:
    assert {kind.name: int(kind) for kind in Kind} == {t.name: int(t) for t in gguf.GGUFValueType}
    assert set(STRUCT) == set(Kind) - {Kind.STRING, Kind.ARRAY}
    numbers = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert all(numbers.get(b.number, b.name) == b.name for b in BY_NAME.values())
