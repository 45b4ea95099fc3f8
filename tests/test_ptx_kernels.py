"""Where kernels run as PTX (QTOOL_TEST_DEVICE=ptx): each change of a kernel's text is found, by its
result or by what its accesses are."""

import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_native_formats as words_set
from cuda_emulation import emulator, placed, room
from test_cuda_encode import encoded
from test_cuda_gemv import awq_tasks, inputs, small_integers
from test_native_gguf_dequantize import random_blocks
from test_native_stored import random_quant

from qtool import native, native_gguf
from qtool.cuda import encode_tasks, float_tasks, more_tasks, tasks
from qtool.gguf_types import BY_NAME

if os.environ.get("QTOOL_TEST_DEVICE") != "ptx":
    pytest.skip("needs NVRTC: make cuda-ptx", allow_module_level=True)

from cuda_ptx import ARRAYS, OnPtx
from ptx import building, machine
from ptx.parse import parse

__all__ = ["emulator"]


def columns(emulator: OnPtx) -> bool:
    """Whether 72 x 136 of GPTQ's words are what the CPU makes of them."""
    packed = words_set.Packed("columns", 4, (72, 136, 8))
    out = room(packed.shape, np.float16)
    given: dict[str, Any] = {"scale": placed(packed.scale), "zero": placed(packed.zero)}
    task = tasks.words(
        placed(packed.words), packed.shape, 4, "columns", group_size=8, out=out, **given
    )
    found = emulator.run(task, out)
    return np.array_equal(found.view(np.uint16), packed.found("float16").view(np.uint16))


def whole_columns(emulator: OnPtx) -> bool:
    packed = words_set.Packed("columns", 4, (64, 256, 32))
    out = room(packed.shape, np.float16)
    given: dict[str, Any] = {"scale": placed(packed.scale), "zero": placed(packed.zero)}
    task = tasks.words(
        placed(packed.words), packed.shape, 4, "columns", group_size=32, out=out, **given
    )
    found = emulator.run(task, out)
    return np.array_equal(found.view(np.uint16), packed.found("float16").view(np.uint16))


def blocks_of(name: str, dtype: str = "float16") -> Callable[[OnPtx], bool]:
    def same(emulator: OnPtx) -> bool:
        block = BY_NAME[name]
        columns = 1280 // block.weights * block.weights
        blocks = random_blocks(block, 9 * columns // block.weights).reshape(9, -1)
        out = room((9, columns), np.float16)
        found = emulator.run(float_tasks.gguf(placed(blocks), block, columns, out=out), out)
        want = native_gguf.dequantize(blocks, block, columns, "float16")
        return bool(((found == want) | (np.isnan(found) & np.isnan(want))).all())

    return same


def rows_packed(emulator: OnPtx) -> bool:
    codes = placed(np.arange(70 * 70, dtype=np.uint8).reshape(70, 70) & 7)
    out = room((70, 7), np.int32)
    found = emulator.run(more_tasks.pack(codes, 3, "rows", out=out), out)
    return np.array_equal(found, native.pack(codes, 3, "rows"))


def sums_of_squares(emulator: OnPtx) -> bool:
    weight = placed(np.random.default_rng(0).standard_normal((9, 64)).astype(np.float32))
    edges, out = placed(np.array([0, 4, 9], np.int32)), room((2, 2), np.float64)
    found = emulator.run(encode_tasks.squares(weight, placed(weight * 2), edges, out=out), out)
    return found[:, 0].tolist() == found[:, 1].tolist() and found[0, 0] == native.sums.squares(
        weight[:4]
    )


def encodes(name: str) -> Callable[[OnPtx], bool]:
    def same(emulator: OnPtx) -> bool:
        weight = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
        found = encoded(emulator, weight, BY_NAME[name])
        return np.array_equal(found, native_gguf.encode(weight, BY_NAME[name]))

    return same


def products(emulator: OnPtx) -> bool:
    """Of several blocks that share rows, and count themselves."""
    x = small_integers(3, 2048) if False else inputs(3, 2048)
    quant = random_quant(4, (72, 2048), 128)
    kept, out = [], room((3, 72), np.float16)

    def keep(count: int) -> Any:
        kept.append(room((count,), np.float32))
        return kept[-1]

    done = placed(np.zeros(more_tasks.counters(72), np.int32))
    (task,) = awq_tasks(quant, x)(out, keep, done)
    assert task.fields["splits"] > 1
    emulator.run(task, out)  # which compares with the host
    return not done.any()


WAIT = r"griddepcontrol\.wait;"
CASES = [
    ("dequantize_columns_4_f16", columns, [(r"bar\.sync", 0, ""), (r"setp\.ge\.s32", 0, "setp.gt.s32"),
     (r"setp\.le\.s32", 0, "setp.lt.s32")]),
    ("dequantize_columns_4_f16", whole_columns, [(r"cvt\.rn\.f16x2\.f32 (\S+), (\S+), (\S+);", 0,
     r"cvt.rn.f16x2.f32 \1, \3, \2;"), (r"st\.shared\.v4\.(\w+) (.*), \{(\S+), (\S+),", 0,
     r"st.shared.v4.\1 \2, {\4, \3,"), (r"xor\.b32", 0, "or.b32")]),
    ("dequantize_q4_k_f16", blocks_of("Q4_K"), [(r"(shr\.u32\s+\S+ \S+) 2;", 0, r"\1 3;"),
     (r"add\.s64(.*), 144;", 0, r"add.s64\1, 145;"), (r"(mov\.u32\s+\S+) 29761;", 0, r"\1 29760;"),
     (r"mul\.rn\.f32", 2, "add.rn.f32"), (r"(and\.b32\s+\S+ \S+) 63;", 0, r"\1 62;")]),
    ("dequantize_iq4_nl_f16", blocks_of("IQ4_NL"), [("0xba98", 0, "0x3210"), ("0xba98", 1, "0x3210")]),
    ("pack_rows_3", rows_packed, [(r"bar\.sync", 0, ""), (r"shl\.b32(.*), 3;", 0, r"shl.b32\1, 2;")]),
    ("measure_squares", sums_of_squares, [(r"bar\.sync", 0, ""), (r"add\.rn\.f64", 0, "sub.rn.f64")]),
    ("encode_q8_0", encodes("Q8_0"), [(r"div\.rn\.f32", 0, "mul.rn.f32"), (r"max\.f32", 0, "min.f32")]),
    ("gemv_across_4", products, [(r"bar\.sync", 0, ""), (r"bar\.sync", 1, ""), (r"bar\.sync", 2, ""),
     (r"atom\.\S+ (\S+), .*;", 0, r"mov.u32 \1, 0;"), (WAIT, 0, ""),
     (r"(mma\S+ .*) \{(\S+), (\S+)\},", 0, r"\1 {\3, \2},"), (r"0x3c00", 0, "0x3c01")]),
]  # fmt: skip


def entry(text: str, kernel: str) -> tuple[int, int]:
    begin = text.index(f".entry {kernel}(")
    end = text.find(".entry", begin + 1)
    return begin, end if end > 0 else len(text)


@pytest.mark.parametrize(
    ("kernel", "right", "old", "number", "new"),
    [(kernel, right, *one) for kernel, right, changes in CASES for one in changes],
)
def test_a_change_is_found(
    emulator: OnPtx, monkeypatch: pytest.MonkeyPatch, kernel: str, right: Callable[[OnPtx], bool],
    old: str, number: int, new: str,
) -> None:  # fmt: skip
    assert right(emulator)
    text = building.ptx_of(kernel, emulator.arch)
    begin, end = entry(text, kernel)
    places = list(re.finditer(old, text[begin:end]))
    if not places:
        pytest.skip(f"{kernel} has no such instruction for {emulator.arch}")
    there = places[number]
    changed = there.expand(new) if new else "//"
    text = text[: begin + there.start()] + changed + text[begin + there.end() :]
    own = machine.compiled(parse(text), kernel, len(ARRAYS))
    monkeypatch.setattr(emulator, "compiled", lambda _: own)
    try:
        found = not right(emulator)
    except AssertionError:
        found = True
    assert found
