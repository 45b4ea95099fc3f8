"""Where kernels run as PTX (QTOOL_TEST_DEVICE=ptx): each change of a kernel's text is found, by its
result or by what its accesses are."""

import dataclasses
import os
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from qtool import native, native_gguf
from qtool.cuda import encode_tasks, float_tasks, pack_gemv_tasks, tasks
from qtool.gguf_types import BY_NAME
from qtool.native.sums import squares
from support.cuda.cuda_emulation import emulator, placed, room
from support.cuda.encoded_blocks import encoded
from support.cuda.gemv_tasks import awq_tasks, inputs, of_layout
from support.cuda.tried_kernels import TRIED, by, compiled
from support.kernels import packed_definitions as define
from support.kernels import packed_words
from support.kernels.random_matrices import random_blocks, random_quant

if os.environ.get("QTOOL_TEST_DEVICE") != "ptx":
    pytest.skip("needs NVRTC: make cuda-ptx", allow_module_level=True)
if os.environ.get("QTOOL_TEST_ARCH", "sm_90") != "sm_90":
    pytest.skip("changes are of what is made for sm_90", allow_module_level=True)

from support.cuda.cuda_ptx import ARRAYS, OnPtx
from support.ptx import building, machine
from support.ptx.parse import parse

__all__ = ["compiled", "emulator"]


def columns(*shape: int) -> Callable[[OnPtx], bool]:
    """GPTQ's words, of so many rows, columns and columns in a group: true, if they are right."""

    def same(emulator: OnPtx) -> bool:
        packed = packed_words.Packed("columns", 4, shape)
        out, words = room(packed.shape, np.float16), placed(packed.words)
        given: dict[str, Any] = {"scale": placed(packed.scale), "zero": placed(packed.zero)}
        given |= {"group_size": shape[2], "out": out}
        found = emulator.run(tasks.words(words, packed.shape, 4, "columns", **given), out)
        define.same(found, packed.found("float16"))
        return True

    return same


def blocks(name: str) -> Callable[[OnPtx], bool]:
    def same(emulator: OnPtx) -> bool:
        block = BY_NAME[name]
        columns = 2048 // block.weights * block.weights
        given = placed(random_blocks(block, 9 * columns // block.weights).reshape(9, -1))
        out = room((9, columns), np.float16)
        found = emulator.run(float_tasks.gguf(given, block, columns, out=out), out)
        want = native_gguf.dequantize(given, block, columns, "float16")
        define.same(found, want)
        return True

    return same


def rows_packed(emulator: OnPtx) -> bool:
    codes = placed(np.arange(70 * 70, dtype=np.uint8).reshape(70, 70) & 7)
    out = room((70, 7), np.int32)
    found = emulator.run(pack_gemv_tasks.pack(codes, 3, "rows", out=out), out)
    return np.array_equal(found, native.pack(codes, 3, "rows"))


def sums_of_squares(emulator: OnPtx) -> bool:
    weight = placed(np.random.default_rng(0).standard_normal((9, 64)).astype(np.float32))
    back = placed(weight * np.float32(1.25))
    edges, out = placed(np.array([0, 4, 9], np.int32)), room((2, 2), np.float64)
    found = emulator.run(encode_tasks.squares(weight, back, edges, out=out), out)
    want = [
        [squares(x), squares(x, y)] for x, y in ((weight[:4], back[:4]), (weight[4:], back[4:]))
    ]
    return bool(found.tolist() == want)


def encodes(name: str) -> Callable[[OnPtx], bool]:
    def same(emulator: OnPtx) -> bool:
        weight = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
        found = encoded(emulator, weight, BY_NAME[name])
        return np.array_equal(found, native_gguf.encode(weight, BY_NAME[name]))

    return same


def products(emulator: OnPtx) -> bool:
    """Of several blocks that share rows, and count themselves."""
    x, quant = inputs(3, 2048), random_quant(4, (72, 2048), 128)
    kept, out = [], room((3, 72), np.float16)

    def keep(count: int) -> Any:
        kept.append(room((count,), np.float32))
        return kept[-1]

    done = placed(np.zeros(pack_gemv_tasks.counters(72), np.int32))
    make = awq_tasks(quant, x)
    (task,) = make(out, keep, done)
    assert task.fields["splits"] > 1
    emulator.run(task, out)  # which compares with the host
    return not done.any()


def products_of_blocks(emulator: OnPtx) -> bool:
    """Of several turns of each thread, more than one of which is on its way."""
    columns, x = 256 * 20, inputs(2, 256 * 20)
    blocks = placed(random_blocks(BY_NAME["Q4_K"], 40 * 20).reshape(40, -1))
    blocks.reshape(-1, 144)[:, :4].view(np.float16)[...] = 0.01
    out = room((2, 40), np.float16)
    with patch.object(pack_gemv_tasks, "splits_of", lambda *_: 1):
        (task,) = pack_gemv_tasks.gemv_q4_k(blocks, columns, x, out=out, room=lambda _: None)
    emulator.run(task, out)  # which compares with the host
    return True


def products_tried(name: str) -> Callable[[OnPtx], bool]:
    """Of a kernel of tests/gpu/tried.h, of several turns of each warp."""

    def same(emulator: OnPtx) -> bool:
        layout, *_, rows = TRIED[name]
        _, make, _, _ = of_layout(layout, (rows, 2816))
        tasks, out = make(inputs(2, 2816)), room((2, rows), np.float16)
        (task,) = by(name, tasks, 1)(out, None, None)
        emulator.run(task, out)  # which compares with the host
        return True

    return same


def test_a_launch_has_to_ask_for_all_of_its_shared_memory(emulator: OnPtx) -> None:
    _, make, _, _ = of_layout("across", (128, 1024))
    out = room((1, 128), np.float16)
    (task,) = by("tried_across_broad", make(inputs(1, 1024)), 1)(out, None, None)
    assert emulator.fault(task, out.size) is None
    said = emulator.fault(dataclasses.replace(task, shared=task.shared - 16), out.size)
    assert said is not None and "outside of shared" in said


BULK, RING = products_tried("tried_columns_bulk"), products_tried("tried_columns_ring")
BROAD, WIDE = products_tried("tried_across_broad"), products_tried("tried_across_wide")
NO_BARRIER = (r"bar\.sync", 0, "")
CASES = [
    ("dequantize_columns_4_f16", columns(72, 136, 8), NO_BARRIER),
    ("dequantize_columns_4_f16", columns(72, 136, 8), (r"setp\.(?:ge|le)\.s64", 0, "setp.eq.s64")),
    ("dequantize_columns_4_f16", columns(64, 256, 32), NO_BARRIER),
    ("dequantize_columns_4_f16", columns(64, 256, 32), (r"xor\.b32", None, "or.b32")),
    (
        "dequantize_columns_4_f16",
        columns(64, 256, 32),
        (r"cvt\.rn\.f16x2\.f32 (\S+), (\S+), (\S+);", -1, r"cvt.rn.f16x2.f32 \1, \3, \2;"),
    ),
    ("dequantize_q4_k_f16", blocks("Q4_K"), (r"(shr\.u32\s+\S+ \S+) 2;", 0, r"\1 3;")),
    ("dequantize_q4_k_f16", blocks("Q4_K"), (r"add\.s64(.*), 144;", 0, r"add.s64\1, 145;")),
    ("dequantize_q4_k_f16", blocks("Q4_K"), (r"add\.s64(.*), 432;", 0, r"add.s64\1, 4320;")),
    ("dequantize_q4_k_f16", blocks("Q4_K"), (r"(mov\.u32\s+\S+) 29761;", 0, r"\1 29760;")),
    ("dequantize_q4_k_f16", blocks("Q4_K"), (r"(and\.b32\s+\S+ \S+) 63;", 0, r"\1 62;")),
    ("dequantize_iq4_nl_f16", blocks("IQ4_NL"), ("0xba98", 0, "0x3210")),
    ("dequantize_iq4_nl_f16", blocks("IQ4_NL"), ("0xba98", 1, "0x3210")),
    ("pack_rows_3", rows_packed, NO_BARRIER),
    ("pack_rows_3", rows_packed, (r"shl\.b32(.*), 5;", 0, r"shl.b32\1, 4;")),
    ("measure_squares", sums_of_squares, NO_BARRIER),
    ("measure_squares", sums_of_squares, (r"add\.rn\.f64", None, "sub.rn.f64")),
    ("encode_q8_0", encodes("Q8_0"), (r"div\.rn\.f32", 0, "mul.rn.f32")),
    ("gemv_across_4", products, NO_BARRIER),
    ("gemv_across_4", products, (r"bar\.sync", 1, "")),
    ("gemv_across_4", products, (r"bar\.sync", 2, "")),
    ("gemv_across_4", products, (r"atom\.\S+ (\S+), .*;", 0, r"mov.u32 \1, 0;")),
    ("gemv_across_4", products, (r"griddepcontrol\.wait;", None, "")),
    ("gemv_across_4", products, (r"(mma\S+ .*) \{(\S+), (\S+)\},", 0, r"\1 {\3, \2},")),
    ("gemv_q4_k", products_of_blocks, (r"bar\.warp\.sync", 0, "")),
    ("gemv_q4_k", products_of_blocks, (r"bar\.warp\.sync", 1, "")),
    ("gemv_q4_k", products_of_blocks, (r"wait_group 1", 0, "wait_group 2")),
    ("gemv_q4_k", products_of_blocks, (r"cp\.async\.commit_group", -1, "")),
    ("gemv_q4_k", products_of_blocks, (r"cp\.async\.ca", 3, "")),
    ("gemv_q4_k", products_of_blocks, (r"griddepcontrol\.wait;", None, "")),
    ("tried_columns_ring", RING, (r"bar\.warp\.sync", 0, "")),
    ("tried_columns_ring", RING, (r"bar\.warp\.sync", 1, "")),
    ("tried_columns_ring", RING, (r"wait_group 1", 0, "wait_group 2")),
    ("tried_across_broad", BROAD, (r"bar\.warp\.sync", 0, "")),
    ("tried_across_broad", BROAD, (r"bar\.warp\.sync", 1, "")),
    ("tried_across_broad", BROAD, (r"wait_group 1", 0, "wait_group 2")),
    ("tried_across_broad", BROAD, (r"cp\.async\.cg", -1, "")),
    ("tried_across_wide", WIDE, (r"griddepcontrol\.wait;", None, "")),
    ("tried_columns_bulk", BULK, (r"bar\.warp\.sync", -1, "")),
    ("tried_columns_bulk", BULK, (r"mbarrier\.init.*;", 0, "")),
    ("tried_columns_bulk", BULK, (r"(mbarrier\.arrive\S+ _, \S+) \S+;", 0, r"\1 16;")),
    ("tried_columns_bulk", BULK, (r"mbarrier\.try_wait\S+ (\S+), .*;", 0, r"mov.pred \1, 1;")),
    ("tried_columns_bulk", BULK, (r"(mbarrier\.try_wait\S+ \S+ \S+) \S+;", 0, r"\1 0;")),
    ("tried_columns_bulk", BULK, (r"(cp\.async\.bulk\S+ \S+ \S+) \S+ ", 0, r"\1 240, ")),
]


def entry(text: str, kernel: str) -> tuple[int, int]:
    begin = text.index(f".entry {kernel}(")
    end = text.find(".entry", begin + 1)
    return begin, end if end > 0 else len(text)


@pytest.mark.parametrize(
    ("kernel", "right", "change"),
    CASES,
    ids=[f"{kernel}-{change[0]}-{change[1]}" for kernel, _, change in CASES],
)
def test_a_change_is_found(
    emulator: OnPtx,
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    right: Callable[[OnPtx], bool],
    change: tuple[str, int | None, str],
) -> None:
    """Of one instruction, or (None) of all of a kind."""
    assert right(emulator)
    text = building.ptx_of(kernel, emulator.arch)
    begin, end = entry(text, kernel)
    old, number, new = change
    places = list(re.finditer(old, text[begin:end]))
    for place in reversed(places) if number is None else [places[number]]:
        changed = place.expand(new) if new else "//"
        text = text[: begin + place.start()] + changed + text[begin + place.end() :]
    own = machine.compiled(parse(text), kernel, len(ARRAYS))
    monkeypatch.setattr(emulator, "compiled", lambda _: own)
    try:
        found = not right(emulator)
    except AssertionError:
        found = True
    assert found
