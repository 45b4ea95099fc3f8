"""Tensors of a checkpoint put together of those of a GGUF file, against plain numpy."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool import native_gguf
from qtool.errors import FormatError
from qtool.gguf.architectures.modules import Module
from qtool.gguf.from_hf.cuts import Cut
from qtool.gguf.from_hf.row_maps import EVEN_ROWS, FIRST_HALF, ODD_ROWS, SECOND_HALF, RowMap, Rows
from qtool.gguf.source import SourceTensor, as_floats
from qtool.gguf.to_hf.joined import Part, joined
from qtool.gguf_mixtures.table import TYPES
from qtool.gguf_types import F32

_Q4 = TYPES["Q4_0"]


def tensor(name: str, values: NDArray[np.float32], kind: str = "F32") -> SourceTensor:
    """float32 [..., out, in] as a file has it."""
    flat = np.ascontiguousarray(values).reshape(-1, values.shape[-1])
    if kind == "F32":
        raw = flat.view(np.uint8)
    elif kind == "F16":
        raw = flat.astype(np.float16).view(np.uint8)
    else:
        raw = native_gguf.encode(flat, TYPES[kind])
    return SourceTensor(name, values.shape, TYPES[kind], lambda a, b: raw[a:b])


def numbers(one: SourceTensor) -> NDArray[np.float32]:
    """What the file holds, of its own shape."""
    return as_floats(one, one.read(0, one.rows)).reshape(one.shape)


def in_pieces(whole: SourceTensor, step: int) -> NDArray[np.float32]:
    """Rows read a few at a time, as exports read them."""
    ends = [(a, min(a + step, whole.rows)) for a in range(0, whole.rows, step)]
    raw = np.concatenate([whole.read(a, b) for a, b in ends])
    return as_floats(whole, raw).reshape(whole.shape)


def random(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("keys", "values"), [("F32", "F32"), ("F16", "F16"), ("Q8_0", "Q4_0"),
                                              ("Q8_0", "Q8_0"), ("F16", "F32")])  # fmt: skip
def test_keys_and_values_of_latents(keys: str, values: str) -> None:
    """kv_b[h, :3] is k_b[h] transposed, kv_b[h, 3:] is v_b[h]."""
    heads, latents = 3, 64
    k = tensor("k", random(heads, latents, 32), keys)
    v = tensor("v", random(heads, 5, latents), values)
    parts = [
        Part(k, Module("k", within="kv", cut=Cut(heads, 37, 0, 32, transposed=True)), 1),
        Part(v, Module("v", within="kv", cut=Cut(heads, 37, 32, 37)), 1),
    ]
    expected = np.concatenate([numbers(k).swapaxes(1, 2), numbers(v)], axis=1)
    for step in (1, 7, 37, 1000):
        whole = joined(parts, "kv", "here")
        assert whole.shape == (heads * 37, latents)
        assert np.array_equal(in_pieces(whole, step), expected.reshape(heads * 37, latents))
    assert whole.type.name == (keys if keys == values and keys != "Q8_0" else "F32")


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
@pytest.mark.parametrize("maps", [(FIRST_HALF, SECOND_HALF), (EVEN_ROWS, ODD_ROWS)])
def test_gate_and_up_of_experts(maps: tuple[RowMap, RowMap], kind: str) -> None:
    """Halves of each expert, or interleaved rows; blocks stay what they are."""
    gate, up = (tensor(name, random(3, 4, 32) + n, kind) for n, name in enumerate("gu"))
    parts = [
        Part(one, Module(one.name, rows, within="gu"), 3)
        for one, rows in zip((gate, up), maps, strict=True)
    ]
    whole = joined(parts, "gu", "here")
    g, u = numbers(gate), numbers(up)
    if maps[0] is FIRST_HALF:
        expected = np.concatenate([g, u], axis=1)
    else:
        expected = np.stack([g, u], axis=2).reshape(3, 8, 32)
    assert whole.type.name == kind and whole.shape == (3, 8, 32)
    for step in (1, 5, 24):
        assert np.array_equal(in_pieces(whole, step), expected)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_experts_that_are_transposed(kind: str) -> None:
    """Llama 4's gate beside up, and gpt-oss' interleaved: [experts, width, 2 * inner]."""
    gate, up = (tensor(name, random(2, 4, 32) + n, kind) for n, name in enumerate("gu"))
    for maps in ((FIRST_HALF, SECOND_HALF), (EVEN_ROWS, ODD_ROWS)):
        parts = [
            Part(one, Module(one.name, rows, within="gu", cut=Cut(transposed=True)), 2)
            for one, rows in zip((gate, up), maps, strict=True)
        ]
        whole = joined(parts, "gu", "here")
        g, u = numbers(gate).swapaxes(1, 2), numbers(up).swapaxes(1, 2)
        beside = np.concatenate([g, u], axis=2)
        expected = beside if maps[0] is FIRST_HALF else np.stack([g, u], axis=3)
        assert whole.type.name == ("F32" if kind == "Q8_0" else kind)
        assert np.array_equal(in_pieces(whole, 7), expected.reshape(2, 32, 8))


def test_biases_of_interleaved_experts() -> None:
    gate, up = (tensor(name, random(3, 5) + n) for n, name in enumerate("gu"))
    parts = [
        Part(one, Module(one.name, rows, within="gu", cut=Cut(transposed=True)), 3, bias=True)
        for one, rows in zip((gate, up), (EVEN_ROWS, ODD_ROWS), strict=True)
    ]
    whole = joined(parts, "gu", "here")
    expected = np.stack([numbers(gate), numbers(up)], axis=2).reshape(3, 10)
    assert whole.shape == (3, 10)
    assert np.array_equal(in_pieces(whole, 1), expected)
    assert np.array_equal(in_pieces(whole, 3), expected)


def _some(order: Rows, total: int) -> RowMap:
    def forward(rows: Rows, groups: int, count: int) -> Rows:
        return order[rows]

    return RowMap(forward, forward, "heads", taken=(total, len(order)))


def test_rows_of_two_kinds_mixed_in_one_matrix() -> None:
    order = np.random.default_rng(3).permutation(11)
    one, other = tensor("one", random(7, 32), "Q4_0"), tensor("other", random(4, 32), "Q4_0")
    parts = [
        Part(one, Module("one", _some(order[:7], 11), within="both"), 1),
        Part(other, Module("other", _some(order[7:], 11), within="both"), 1),
    ]
    whole = joined(parts, "both", "here")
    expected = np.empty((11, 32), np.float32)
    expected[order[:7]], expected[order[7:]] = numbers(one), numbers(other)
    assert whole.type == _Q4
    assert np.array_equal(in_pieces(whole, 3), expected)


def test_what_is_no_part_is_said() -> None:
    gate, up = (
        Part(tensor(name, random(2, 4, 32)), Module(name, rows, within="gu"), 2)
        for name, rows in (("gate", FIRST_HALF), ("up", SECOND_HALF))
    )
    longer = replace(up, tensor=tensor("up", random(2, 6, 32)))
    for parts in ([gate], [gate, longer], [gate, up, up]):
        with pytest.raises(FormatError, match=r"here: gate \[2, 4, 32\].* not the parts of one gu"):
            joined(parts, "gu", "here")
    assert joined([gate, up], "gu", "here").type == F32
