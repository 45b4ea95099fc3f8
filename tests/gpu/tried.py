"""Kernels that gemv.py times: qtool's own, these of other sizes, and those of tried.h."""

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qtool.cuda import compiling
from qtool.cuda.tasks import ceil

_HERE = Path(__file__).parent
# Threads of a block, warps next to each other, (turns of a ring,) blocks an SM has registers for,
# (and for how many runs it asks ahead; or how many it takes at a time;) and rows of a warp, where
# they are not as many as usual.
WORDS = [(256, 2, 2), (256, 1, 2), (512, 1, 1)]
BLOCKS = [(128, 1, 2, 4), (128, 1, 1, 4)]
AHEAD = [(256, 2, 2, 0), (256, 2, 2, 1), (256, 2, 2, 3), (256, 1, 2, 1), (256, 1, 2, 3)]
AHEAD += [(512, 1, 1, 1)]
RINGS = [(128, 1, 2, 4), (128, 1, 2, 5), (256, 1, 1, 3), (256, 1, 2, 2), (256, 2, 2, 2)]
RINGS += [(512, 1, 2, 1)]
ABREAST = [(256, 4, 2), (512, 8, 1)]  # of AWQ
WIDE = [(256, 1, 1, 4, 128), (256, 2, 1, 4, 128), (128, 1, 3, 4, 128), (512, 4, 1, 2, 128)]
WIDE += [(256, 2, 2, 2, 128), (256, 1, 1, 2, 256)]
BROAD = [(256, 1, 1, 2, 128), (256, 2, 1, 2, 128), (128, 1, 2, 2, 128), (256, 2, 2, 1, 128)]
BROAD += [(512, 4, 1, 1, 128), (256, 4, 2, 2), (128, 1, 6, 2), (128, 2, 6, 2)]
HALVES = [(128, 1, 4, 5, 32), (256, 1, 2, 3, 32), (256, 1, 4, 2, 32)]  # of GPTQ
BLOCK_RINGS = [(128, 1, 2, 4), (256, 1, 1, 2), (256, 1, 2, 2), (256, 2, 2, 2)]
BULK = {
    "gptq": [(128, 1, 2, 4, 64), (256, 1, 2, 2, 64), (256, 2, 2, 2, 64), *HALVES],
    "q4_k": [(128, 1, 2, 4), (256, 1, 2, 2), (256, 2, 2, 2)],
}
LAYOUTS = {
    ("awq", ""): "GemvWords<true, {}>", ("gptq", ""): "GemvWords<false, {}>",
    ("awq", "ahead"): "WordsAhead<true, {}>", ("gptq", "ahead"): "WordsAhead<false, {}>",
    ("awq", "ring"): "WordsRing<true, {}>", ("gptq", "ring"): "WordsRing<false, {}>",
    ("awq", "wide"): "WordsWide<{}>", ("awq", "broad"): "WordsRing<true, {}>",
    ("q4_k", ""): "GemvQ4K<{}>", ("q4_k", "ring"): "RowsRing<{}>",
    ("q4_k", "early"): "BlocksEarly<{}>",
    ("gptq", "bulk"): "WordsRing<false, {}, true>", ("q4_k", "bulk"): "RowsRing<{}, true>",
}  # fmt: skip
NAMES = {"awq": "across", "gptq": "columns", "q4_k": "q4_k"}
ROWS = {"awq": 64, "gptq": 64, "q4_k": 32}  # of a warp, and columns that it takes at a time
COLUMNS = {"awq": 128, "gptq": 128, "q4_k": 256}
PLACES = {"awq": 66.5, "gptq": 66.5, "q4_k": 160.0}  # bytes of a row in a turn of a ring
APART = {"gptq": 512, "q4_k": 0}  # and of what lies between bulk copies
RING, OWN_ROOM = ("ring", "broad", "bulk"), 48 << 10  # bytes that a launch need not ask for
VECTORS = 8  # that a block has sums for


def source(header: str = "tried.h") -> str:
    """A header and those of this folder that it includes, as one text: only qtool's own are where
    the compiler looks for them."""
    seen: set[str] = set()

    def inlined(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (_HERE / name).read_text()
        return re.sub(r'#include "(tried\w*\.h)"\n', lambda found: inlined(found[1]), text)

    return inlined(header)


@dataclass(frozen=True)
class Kernel:
    kind: str
    family: str
    numbers: tuple[int, ...]

    @property
    def layout(self) -> str:
        numbers = ", ".join(map(str, self.numbers))
        return f"qt::Gemv<qt::{LAYOUTS[self.kind, self.family].format(numbers)}>"

    @property
    def rows(self) -> int:
        """Of a warp."""
        return self.numbers[4] if len(self.numbers) == 5 else ROWS[self.kind]

    @property
    def room(self) -> int:
        """Bytes of shared memory of a block: sums of all warps, a flag, a ring and its barriers."""
        threads, _, turns, *_ = self.numbers
        turns = turns if self.family in RING else 0
        sums, turn = VECTORS * (self.rows + 4) * 4, int(self.rows * PLACES[self.kind])
        if self.family == "bulk":
            turn += APART[self.kind] + 8
        rest = 16 if turns else 32  # no ring is a byte
        return ceil(threads // 32 * (sums + turns * turn), 16) * 16 + rest

    @property
    def shared(self) -> int:
        """Bytes that its launch has to ask for."""
        return self.room if self.family in RING or self.room > OWN_ROOM else 0

    @property
    def unit(self) -> str:
        found = source()
        if not self.shared:
            return f"{found}\nQT_KERNEL(gemv_tried, {self.layout})\n"
        found += f"\nQT_ROOMY_KERNEL(gemv_tried, {self.layout})\n"
        return f"{found}static_assert(sizeof({self.layout}::Room) == {self.room});\n"

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        """As `_BLOCKS` of pack_gemv_tasks has it."""
        threads, abreast = self.numbers[:2]
        few = self.family in ("ahead", "wide") or len(self.numbers) == 3
        resident = self.numbers[2 if few else 3]
        return self.rows * abreast, threads // 32 // abreast, threads, resident

    @property
    def name(self) -> str:
        return "-".join([*([self.family] if self.family else []), *map(str, self.numbers)])

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def kernels_of(kind: str) -> list[Kernel]:
    """qtool's own first."""
    families = {"": WORDS, "ahead": AHEAD, "ring": RINGS + (HALVES if kind == "gptq" else [])}
    if kind == "q4_k":
        families = {"": BLOCKS, "early": BLOCKS[:1], "ring": BLOCK_RINGS}
    if kind == "awq":
        families |= {"": WORDS + ABREAST, "wide": WIDE, "broad": BROAD}
    families["bulk"] = BULK.get(kind, [])
    return [Kernel(kind, name, numbers) for name, all_ in families.items() for numbers in all_]


def loaded_kernel(kernel: Kernel, code: Any) -> Any:
    """A kernel as running has it, which may be launched with all the memory that it shares."""
    found = code.get_kernel("gemv_tried")
    if kernel.shared:
        from cuda.bindings import driver

        # The next kernel begins beside it where an SM has set enough aside for both.
        names, prefix = driver.CUfunction_attribute, "CU_FUNC_ATTRIBUTE_"
        for name, value in (
            ("MAX_DYNAMIC_SHARED_SIZE_BYTES", kernel.shared),
            ("PREFERRED_SHARED_MEMORY_CARVEOUT", 100),
        ):
            what = getattr(names, prefix + name)
            (status,) = driver.cuKernelSetAttribute(what, value, int(found.handle), 0)
            assert int(status) == 0, f"{kernel}: {name} is refused, {status}"
    return found


def compiled(kernels: list[Kernel]) -> dict[Kernel, Any]:
    """Those that could be compiled and loaded, qtool's own among them."""
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    found: dict[Kernel, Any] = {}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        compile_ = compiling.compile_source
        under_way = [pool.submit(compile_, "tried", kernel.unit, arch) for kernel in kernels]
        for kernel, code in zip(kernels, under_way, strict=True):
            try:
                own = compiling.core().ObjectCode.from_cubin(code.result())
                found[kernel] = loaded_kernel(kernel, own)
            except Exception as error:
                if not kernel.family:
                    raise
                print(f"{kernel}: {error}", flush=True)
    return found
