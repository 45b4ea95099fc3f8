"""The GGUF writer: bytes by gguf-py, rows from threads, and what it refuses."""

import errno
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest

from qtool.errors import FormatError, UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_values import Kind, Value, array, boolean, f32, string, strings, u32
from qtool.formats.gguf_writer import GgufWriter, TensorSpec, lay_out
from qtool.gguf_types import BY_NAME, F16, F32
from qtool.workspaces import staging
from qtool.workspaces.staging import staged_file
from support.gguf import gguf_files

METADATA = {
    "general.architecture": string("llama"),
    "text": string("é漢字\n"),
    "count": u32(4_000_000_000),
    "small": Value(Kind.INT32, -5),
    "share": f32(0.1),
    "yes": boolean(True),
    "long": Value(Kind.UINT64, 1 << 63),
    "double": Value(Kind.FLOAT64, 1e300),
    "tokens": strings(["a", "", "漢"]),
    "scores": array(Kind.FLOAT32, [0.0, -1.5]),
    "flags": array(Kind.BOOL, [True, False]),
    "types": array(Kind.INT32, [1, -1]),
}
SPECS = [
    TensorSpec("first.weight", (3, 32), F16),
    TensorSpec("odd.bias", (5,), F32),
    TensorSpec("experts.weight", (2, 3, 64), BY_NAME["Q8_0"]),
    TensorSpec("last.weight", (1, 7, 4), F32),
]


def rows_of(spec: TensorSpec, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng([seed, *spec.name.encode()])
    return draw.integers(0, 256, (spec.rows, spec.row_bytes), np.uint8)


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "x.gguf", os.O_RDWR | os.O_CREAT)
    yield number
    os.close(number)


def test_same_bytes_as_gguf_py(descriptor: int, tmp_path: Path) -> None:
    writer = GgufWriter(descriptor, lay_out(METADATA, SPECS))
    theirs = gguf.GGUFWriter(tmp_path / "y.gguf", "llama")
    kinds = gguf.GGUFValueType
    for key, value in list(METADATA.items())[1:]:
        element = None if value.element is None else kinds(value.element)
        theirs.add_key_value(key, value.value, kinds(value.kind), element)
    types = gguf.GGMLQuantizationType
    for number, spec in enumerate(SPECS):
        raw = rows_of(spec)
        writer.rows(number, 0, raw)
        shaped = raw.reshape(*spec.shape[:-1], -1)
        if spec.type in (F32, F16):
            shaped = shaped.view(np.float32 if spec.type == F32 else np.float16)
            theirs.add_tensor(spec.name, shaped)
        else:
            theirs.add_tensor(spec.name, shaped, raw_dtype=types(spec.type.number))
    writer.finish()
    theirs.write_header_to_file()
    theirs.write_kv_data_to_file()
    theirs.write_tensors_to_file()
    theirs.close()
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "y.gguf").read_bytes()


def test_read_back(descriptor: int, tmp_path: Path) -> None:
    layout = lay_out(METADATA, SPECS)
    writer = GgufWriter(descriptor, layout)
    for number, spec in enumerate(SPECS):
        writer.rows(number, 0, rows_of(spec))
    writer.finish()
    with GgufFile.open(tmp_path / "x.gguf") as file:
        assert dict(file.metadata).keys() == METADATA.keys()
        assert all(file.metadata[k] == v for k, v in METADATA.items() if k != "share")
        # Arrays that were read are written again without a look at their elements.
        again = lay_out({**file.metadata, "share": METADATA["share"]}, SPECS)
        assert again.header == layout.header
        for spec in SPECS:
            info = file.tensors[spec.name]
            assert (info.shape, info.type) == (spec.shape, spec.type)
            assert (file.read_rows(spec.name, 0, spec.rows) == rows_of(spec)).all()


def test_rows_in_any_order_from_any_thread(tmp_path: Path) -> None:
    specs = [TensorSpec(f"blk.{n}.weight", (97, 33), F32) for n in range(5)]

    def write(name: str, seed: int) -> bytes:
        number = os.open(tmp_path / name, os.O_RDWR | os.O_CREAT)
        writer = GgufWriter(number, lay_out(METADATA, specs))
        pieces = [(t, first) for t in range(5) for first in range(0, 97, 10)]
        random.Random(seed).shuffle(pieces)
        raw = [rows_of(spec) for spec in specs]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda p: writer.rows(p[0], p[1], raw[p[0]][p[1] : p[1] + 10]), pieces))
        writer.finish()
        os.close(number)
        return (tmp_path / name).read_bytes()

    assert write("a", 1) == write("b", 2)


def test_every_byte_once(descriptor: int) -> None:
    layout = lay_out({}, SPECS)

    def fill(skip: int = -1, twice: int = -1) -> GgufWriter:
        writer = GgufWriter(descriptor, layout)
        for number, spec in enumerate(SPECS):
            raw = rows_of(spec)
            writer.rows(number, 0, raw[: len(raw) - (number == skip)])
            if number == twice:
                writer.rows(number, 0, raw[:1])
        return writer

    fill().finish()
    for number, spec in enumerate(SPECS):
        with pytest.raises(FormatError, match=rf"{spec.name}.* written never"):
            fill(skip=number).finish()
        with pytest.raises(FormatError, match=rf"{spec.name}.* written twice"):
            fill(twice=number).finish()


def test_rows_that_do_not_fit(descriptor: int) -> None:
    writer = GgufWriter(descriptor, lay_out({}, SPECS))
    raw = rows_of(SPECS[0])
    with pytest.raises(FormatError, match="expected uint8 with 64 bytes a row"):
        writer.rows(0, 0, raw[:, 1:])
    with pytest.raises(FormatError, match=r"rows 1 to 4 of 3"):
        writer.rows(0, 1, raw)
    with pytest.raises(FormatError, match="expected uint8"):
        writer.rows(0, 0, raw.view(np.int8))


def test_alignment(descriptor: int) -> None:
    layout = lay_out({"general.alignment": u32(128)}, SPECS)
    assert all(start % 128 == 0 for start in layout.starts) and layout.size % 128 == 0
    for wrong in (u32(0), u32(48), Value(Kind.INT32, 32)):
        with pytest.raises(FormatError, match="power of two"):
            lay_out({"general.alignment": wrong}, SPECS)


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ([TensorSpec("a", (2,), F32)] * 2, "'a' comes twice"),
        ([TensorSpec("a" * 64, (2,), F32)], "64 bytes; llama.cpp reads 1 to 63"),
        ([TensorSpec("", (2,), F32)], "0 bytes"),
        ([TensorSpec("a", (), F32)], "1 to 4 axes"),
        ([TensorSpec("a", (1, 1, 1, 1, 2), F32)], "1 to 4 axes"),
        ([TensorSpec("a", (3, 0), F32)], "none empty"),
        ([TensorSpec("a", (3, 100), BY_NAME["Q4_K"])], "blocks of 256 weights"),
    ],
)
def test_tensors_that_llama_cpp_would_not_load(specs: list[TensorSpec], said: str) -> None:
    with pytest.raises(FormatError, match=said):
        lay_out({}, specs)


@pytest.mark.parametrize(
    "value",
    [u32(-1), u32(1 << 32), string(5), array(Kind.INT32, ["a"]), Value(Kind.ARRAY, [1])],  # type: ignore[arg-type]
)
def test_values_that_do_not_fit_their_kind(value: Value) -> None:
    with pytest.raises(FormatError, match=r"some\.key: "):
        lay_out({"some.key": value}, SPECS)


def test_a_text_is_replaced_by_one_as_long(descriptor: int, tmp_path: Path) -> None:
    writer = GgufWriter(descriptor, lay_out({**METADATA, "later": string("0000")}, []))
    writer.text("later", "abcd")
    writer.finish()
    assert gguf_files.header(tmp_path / "x.gguf").metadata["later"] == string("abcd")
    with pytest.raises(FormatError, match="not 4 bytes long"):
        writer.text("later", "abc")


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder" / "x.gguf"
    with staged_file(out, 3) as (path, descriptor):
        os.pwrite(descriptor, b"abc", 0)
        assert not out.exists() and path.parent == out.parent and path.name.startswith(".x.gguf.")
    assert out.read_bytes() == b"abc" and [*out.parent.iterdir()] == [out]
    mask = os.umask(0)
    os.umask(mask)
    assert out.stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("error", [KeyboardInterrupt, FormatError, OSError])
def test_nothing_is_left_of_a_failure(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), staged_file(tmp_path / "new" / "x.gguf", 3):
        raise error("no")
    assert not any(tmp_path.iterdir())


def test_bytes_are_on_the_disk_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, sync, seen = tmp_path / "x.gguf", staging.sync, []

    def watched(descriptor: int) -> None:
        seen.append((os.pread(descriptor, 9, 0), out.exists()))
        sync(descriptor)

    monkeypatch.setattr(staging, "sync", watched)
    with staged_file(out, 3) as (_, descriptor):
        os.pwrite(descriptor, b"abc", 0)
    assert seen == [(b"abc", False)] and out.exists()

    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(staging, "sync", fails)
    with (
        pytest.raises(UnsupportedError, match=r"y\.gguf: .*Input/output error"),
        staged_file(tmp_path / "new" / "y.gguf", 3),
    ):
        pass
    assert [*tmp_path.iterdir()] == [out]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    with pytest.raises(UnsupportedError, match="exists"), staged_file(out, 3):
        out.write_bytes(b"mine")
    assert out.read_bytes() == b"mine" and [*tmp_path.iterdir()] == [out]
    with pytest.raises(UnsupportedError, match="exists"), staged_file(out, 3):
        pass
    with pytest.raises(UnsupportedError, match="is a folder"), staged_file(tmp_path, 3):
        pass
    with (
        pytest.raises(UnsupportedError, match="cannot be made: "),
        staged_file(out / "below" / "y.gguf", 3),
    ):
        pass


def test_full_disks_are_told(tmp_path: Path) -> None:
    with (
        pytest.raises(UnsupportedError, match=r"needs 1,[0,]+ bytes, and its disk"),
        staged_file(tmp_path / "x.gguf", 10**18),
    ):
        pass
    with (
        pytest.raises(UnsupportedError, match="the disk is full; free some space"),
        staged_file(tmp_path / "x.gguf", 3),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not any(tmp_path.iterdir())
