"""The container, against a file written by hand and against the safetensors package both ways."""

import errno
import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from qtool.errors import FormatError, UnsupportedError, UsageError
from qtool.formats import safetensors_file as st
from qtool.formats import safetensors_writer
from qtool.formats.safetensors_file import Layout, StreamWriter, TensorSpec, checksum, plan_shards


def test_a_file_written_by_hand(tmp_path: Path) -> None:
    header = (
        b'{"__metadata__":{"k":"v"},'
        b'"b":{"dtype":"I16","shape":[2],"data_offsets":[4,8]},'
        b'"a":{"dtype":"F16","shape":[1,2],"data_offsets":[0,4]}}  '
    )
    assert len(header) == 136
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\x88" + bytes(7) + header + b"\x00\x3c\x00\xc0" + b"\x01\x00\xff\xff")
    tensors, metadata = st.read_header(path)
    assert metadata == {"k": "v"}
    assert list(tensors) == ["b", "a"]
    assert tensors["a"] == st.TensorInfo("a", "F16", (1, 2), 144, 148)
    assert tensors["b"].nbytes == 4 and tensors["a"].size == 2
    raw = st.read_range(path, tensors["a"])
    assert st.to_float32(raw, "F16", (1, 2)).tolist() == [[1.0, -2.0]]
    assert st.as_array(st.read_range(path, tensors["b"]), "I16", (2,)).tolist() == [1, -1]


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "z.f32": rng.standard_normal((3, 5)).astype(np.float32),
        "a.f16": rng.standard_normal((7,)).astype(np.float16),
        "m.i32": rng.integers(-9, 9, (2, 2, 2), dtype=np.int32),
        "e.empty": np.zeros((0, 4), np.float32),
        "s.scalar": np.array(3, np.int64),
        "u.odd": rng.integers(0, 255, 3, dtype=np.uint8),
        "b.bool": np.array([True, False]),
    }


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(arrays(), path, {"format": "np"})
    tensors, metadata = st.read_header(path)
    assert metadata == {"format": "np"}
    assert set(tensors) == set(arrays())
    for name, array in arrays().items():
        info = tensors[name]
        found = st.as_array(st.read_range(path, info), info.dtype, info.shape)
        assert found.dtype == array.dtype and found.shape == array.shape
        assert np.array_equal(found, array)


def specs_of(given: dict[str, np.ndarray]) -> list[TensorSpec]:
    names = {np.dtype(v): k for k, v in st.NUMPY_DTYPES.items() if k != "BF16"}
    return [TensorSpec(n, names[a.dtype], a.shape) for n, a in given.items()]


@pytest.mark.parametrize("shard_bytes", [10**9, 40])
def test_the_package_reads_what_is_written(tmp_path: Path, shard_bytes: int) -> None:
    layout = st.plan_shards(specs_of(arrays()), shard_bytes)
    with StreamWriter(tmp_path, layout) as writer:
        for name, array in reversed(arrays().items()):
            writer.add(name, array)
    found: dict[str, np.ndarray] = {}
    for file in layout.files:
        assert (tmp_path / file.name).stat().st_size == file.size
        found |= load_file(tmp_path / file.name)
        with safe_open(tmp_path / file.name, "np") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert found.keys() == arrays().keys()
    assert all(np.array_equal(found[name], array) for name, array in arrays().items())
    index = tmp_path / st.INDEX_NAME
    assert index.exists() == (len(layout.files) > 1)
    if index.exists():
        content = json.loads(index.read_text())
        total = sum(array.nbytes for array in arrays().values())
        assert content["metadata"]["total_size"] == total
        for name, file_name in content["weight_map"].items():
            assert name in load_file(tmp_path / file_name)


def test_a_whole_file_is_rewritten_to_the_same_bytes(tmp_path: Path) -> None:
    source = tmp_path / "source.safetensors"
    save_file(arrays(), source, {"format": "pt", "é": "ü"})
    tensors, metadata = st.read_header(source)
    specs = [TensorSpec(t.name, t.dtype, t.shape) for t in tensors.values()]
    layout = Layout((st.lay_out("copy.safetensors", specs, metadata),))
    with StreamWriter(tmp_path, layout) as writer:
        for name, info in tensors.items():
            writer.add(name, st.read_range(source, info))
    ours = (tmp_path / "copy.safetensors").read_bytes()
    # The order of metadata keys is arbitrary in the package; everything else must be equal.
    theirs = source.read_bytes()
    assert len(ours) == len(theirs)
    start = min(info.start for info in tensors.values())
    assert ours[start:] == theirs[start:]
    assert json.loads(ours[8:start]) == json.loads(theirs[8:start])
    assert list(json.loads(ours[8:start]))[1:] == list(json.loads(theirs[8:start]))[1:]


def test_wide_dtypes_come_first_so_that_tensors_are_aligned() -> None:
    layout = st.plan_shards(
        [
            TensorSpec("a", "U8", (3,)),
            TensorSpec("b", "F16", (5,)),
            TensorSpec("c", "I64", (1,)),
            TensorSpec("d", "I32", (1,)),
        ]
    )
    (file,) = layout.files
    assert list(file.tensors) == ["c", "d", "b", "a"]
    for info in file.tensors.values():
        assert info.start % st.DTYPE_BYTES[info.dtype] == 0
    assert layout.size == file.size == len(file.header) + 8 + 4 + 10 + 3


def test_shards_hold_at_most_what_is_asked() -> None:
    specs = [TensorSpec(str(i), "U8", (n,)) for i, n in enumerate((4, 6, 11, 3, 8))]
    layout = st.plan_shards(specs, 10)
    assert [list(f.tensors) for f in layout.files] == [["0", "1"], ["2"], ["3"], ["4"]]
    assert [f.name for f in layout.files][1] == "model-00002-of-00004.safetensors"
    assert layout.index is not None
    assert layout.index["weight_map"]["3"] == "model-00003-of-00004.safetensors"
    with pytest.raises(FormatError, match="called 'x'"):
        st.plan_shards([TensorSpec("x", "U8", (4,)), TensorSpec("x", "U8", (4,))], 4)
    with pytest.raises(FormatError, match="called 'x'"):
        st.plan_shards([TensorSpec("x", "U8", (4,)), TensorSpec("x", "U8", (4,))])


def one(tmp_path: Path) -> StreamWriter:
    return StreamWriter(tmp_path, st.plan_shards([TensorSpec("w", "F16", (2, 2))]))


def test_the_writer_refuses_what_was_not_planned(tmp_path: Path) -> None:
    writer = one(tmp_path)
    with pytest.raises(FormatError, match="v: not in the layout"):
        writer.add("v", b"\0" * 8)
    with pytest.raises(
        FormatError, match=r"w: the layout has F16 \[2, 2\], given float32 \[2, 2\]"
    ):
        writer.add("w", np.zeros((2, 2), np.float32))
    with pytest.raises(FormatError, match="given float16"):
        writer.add("w", np.zeros((4,), np.float16))
    with pytest.raises(FormatError, match="given uint8"):
        writer.add("w", b"\0" * 7)
    writer.add("w", np.eye(2, dtype=np.float16))
    with pytest.raises(FormatError, match="written twice"):
        writer.add("w", np.eye(2, dtype=np.float16))
    writer.close()
    assert load_file(tmp_path / "model.safetensors")["w"].tolist() == [[1, 0], [0, 1]]


def test_the_writer_refuses_to_close_with_a_tensor_missing(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="w: never written"), one(tmp_path):
        pass


def test_many_threads_may_add(tmp_path: Path) -> None:
    count = 200
    layout = st.plan_shards([TensorSpec(str(i), "I32", (50,)) for i in range(count)], 3000)
    with StreamWriter(tmp_path, layout) as writer, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: writer.add(str(i), np.full(50, i, np.int32)), range(count)))
    found = {k: v for f in layout.files for k, v in load_file(tmp_path / f.name).items()}
    assert all((found[str(i)] == i).all() for i in range(count)) and len(found) == count


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = one(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UnsupportedError, match=r"model\.safetensors: the disk is full"):
        writer.add("w", b"\0" * 8)
    writer.abandon()


def test_too_large_for_the_disk_is_said_before_any_work(tmp_path: Path) -> None:
    huge = st.plan_shards([TensorSpec("w", "F64", (1 << 55,))])
    with pytest.raises(UnsupportedError, match="bytes are needed"):
        StreamWriter(tmp_path, huge)
    assert list(tmp_path.iterdir()) == []


def test_bfloat16_agrees_with_torch_on_every_pattern() -> None:
    torch = pytest.importorskip("torch")
    every = np.arange(1 << 16, dtype=np.uint16)
    theirs = torch.from_numpy(every.view(np.int16)).view(torch.bfloat16).float().numpy()
    ours = st.to_float32(every.view(np.uint8), "BF16", (1 << 16,))
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    halves = (patterns & np.uint32(0xFFFF0000)) | np.uint32(0x8000)  # ties
    values = np.concatenate([patterns, halves]).view(np.float32)
    values = values[np.abs(np.nan_to_num(values)) < 3e38]
    ours = st.from_float32(values, "BF16", "w").view(np.uint16)
    theirs = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(values)
    assert nan.any() and np.array_equal(ours[~nan], theirs[~nan])
    assert np.isnan(st.to_float32(ours.view(np.uint8), "BF16", ours.shape)[nan]).all()


@pytest.mark.parametrize(("dtype", "value"), [("F16", 65520.0), ("BF16", 3.4e38)])
def test_a_value_too_large_names_the_tensor(dtype: str, value: float) -> None:
    array = np.zeros((3, 4), np.float32)
    array[1, 2] = -value
    with pytest.raises(FormatError, match=rf"^some\.weight: .*\[1, 2\].* {dtype}"):
        st.from_float32(array, dtype, "some.weight")
    array[1, 2] = np.inf  # infinities are kept, not made
    stored = st.from_float32(array, dtype, "some.weight")
    assert np.array_equal(st.to_float32(stored, dtype, (3, 4)), array)


def test_round_to_nearest_even_in_float16() -> None:
    values = np.array([2049.0, 2051.0, 65519.0, 1e-9], np.float32)
    stored = st.from_float32(values, "F16", "w").view(np.float16)
    assert stored.tolist() == [2048.0, 2052.0, 65504.0, 0.0]
    assert st.from_float32(values, "F32", "w").view(np.float32).tolist() == values.tolist()
    with pytest.raises(FormatError, match="cannot be written as I32"):
        st.from_float32(values, "I32", "w")
    with pytest.raises(UnsupportedError, match="found I32"):
        st.to_float32(np.zeros(4, np.uint8), "I32", (1,))


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("2GiB", 2**31), ("17", 17), ("1.5k", 1500)],
)
def test_sizes(text: str, size: int) -> None:
    assert st.parse_size(text, "--size") == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "5XB", "1e9", "five"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError, match=r"--size: .* is no size"):
        st.parse_size(text, "--size")


@pytest.mark.parametrize("sizes", [(24,), (1, 23), (8, 0, 16), (4,) * 6])
def test_a_tensor_in_parts_is_that_in_one(
    sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes and CRC-32; and both are read back by pieces of any size."""
    value = np.random.default_rng(0).integers(0, 256, 24, dtype=np.uint8)
    parts = np.split(value, np.cumsum(sizes)[:-1])
    layout = plan_shards([TensorSpec("a", "U8", (3,)), TensorSpec("b", "F32", (2, 3))])
    before = np.zeros(3, np.uint8)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    with StreamWriter(tmp_path / "whole", layout) as whole:
        whole.add("a", before)
        whole.add("b", value.view("<f4").reshape(2, 3))
    with StreamWriter(tmp_path / "parts", layout) as writer:
        writer.add_parts("a", iter([before]))
        writer.add_parts("b", iter(parts))
        with pytest.raises(FormatError, match="b: written twice"):
            writer.add_parts("b", iter(parts))
    assert writer.checksums == whole.checksums
    written = tmp_path / "parts" / "model.safetensors"
    assert written.read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    info = layout.files[0].tensors["b"]
    for size in (1, 7, 24, 100):
        monkeypatch.setattr(safetensors_writer, "_AT_ONCE", size)
        assert checksum(written, info) == whole.checksums["b"] == zlib.crc32(value)
        again = StreamWriter(tmp_path / "parts", layout)
        assert again.restore(whole.checksums) and again.checksums == whole.checksums
        assert not again.restore(whole.checksums | {"b": 1})
        again.abandon()


@pytest.mark.parametrize(("sizes", "said"), [((8, 15), "given 23"), ((8, 17, 9), "at least 25")])
def test_parts_of_another_size_are_refused(
    sizes: tuple[int, ...], said: str, tmp_path: Path
) -> None:
    layout = plan_shards([TensorSpec("b", "U8", (24,)), TensorSpec("c", "U8", (4,))])
    with StreamWriter(tmp_path, layout) as writer:
        writer.add("c", b"next")
        with pytest.raises(FormatError, match=rf"b: the layout has 24 bytes, .*{said}"):
            writer.add_parts("b", (np.ones(size, np.uint8) for size in sizes))
        assert "b" not in writer.checksums
        with pytest.raises(FormatError, match="d: not in the layout"):
            writer.add_parts("d", [])
        writer.add_parts("b", [np.zeros(24, np.uint8)])
    assert (tmp_path / "model.safetensors").read_bytes().endswith(b"next")
