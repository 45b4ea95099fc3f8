"""PTX written by hand, launched on the machine of tests/support/ptx."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.ptx import machine
from support.ptx.arrays import Array, begin_of
from support.ptx.parse import parse

_HEAD = """
.version 9.0
.target sm_90
.address_size 64
.visible .entry hand({parameters})
.maxntid {threads}, 1, 1
{{
    .reg .pred %p<40>;
    .reg .b16 %h<40>;
    .reg .b32 %r<80>;
    .reg .f32 %f<80>;
    .reg .b64 %rd<40>;
    .shared .align 16 .b8 room[1024];
    .local .align 16 .b8 own[64];
    mov.u32 %r70, %tid.x;
    mov.u32 %r71, %ctaid.x;
    mad.lo.s32 %r72, %r71, {threads}, %r70;
    mul.wide.u32 %rd31, %r72, 4;
{addresses}
    {body}
    ret;
}}
"""


def text_of(body: str, names: list[str], threads: int) -> str:
    """A kernel `hand`: [%rd20], [%rd21] ... are where its arrays begin, [%rd10], [%rd11] ... the
    words of each that the thread's number in the grid has; %r70 is its number in the block."""
    parameters = ", ".join(f".param .u64 hand_{name}" for name in names)
    lines = []
    for k, name in enumerate(names):
        lines.append(f"    ld.param.u64 %rd{20 + k}, [hand_{name}];")
        lines.append(f"    add.s64 %rd{10 + k}, %rd{20 + k}, %rd31;")
    text = _HEAD.format(
        parameters=parameters, threads=threads, body=body, addresses="\n".join(lines)
    )
    return text


def launch(
    body: str,
    threads: int = 32,
    blocks: int = 1,
    only_read: tuple[str, ...] = (),
    core: tuple[int, int] = machine.HOPPER,
    waits: bool = False,
    **arrays: NDArray[Any],
) -> str | None:
    """Runs it on arrays, which it writes; what the first access was that is not allowed."""
    module = parse(text_of(body, list(arrays), threads))
    own = machine.compiled(module, "hand", len(arrays))
    given = [
        Array(
            name,
            array.reshape(-1).view(np.uint8),
            name not in only_read,
            own.grains["global"],
            real=1,
        )
        for name, array in arrays.items()
    ]
    grid = machine.Grid((blocks, 1), threads, core, waits)
    return machine.run(own, grid, given, [begin_of(k) for k in range(len(given))])


def words(body: str, *given: Any, threads: int = 32) -> NDArray[np.uint32]:
    """What a body leaves in %r0, of words that it finds in %r1, %r2 ... (and %f1, %f2 ...)."""
    arrays = {}
    loads = []
    for k, values in enumerate(given):
        padded = np.resize(np.asarray(values), threads)
        arrays[f"in{k}"] = padded.astype(padded.dtype if padded.itemsize == 4 else np.uint32)
        loads.append(f"ld.global.b32 %r{k + 1}, [%rd{11 + k}]; mov.b32 %f{k + 1}, %r{k + 1};")
    out = np.zeros(threads, np.uint32)
    said = launch(f"{' '.join(loads)} {body} st.global.b32 [%rd10], %r0;", threads,
                  only_read=tuple(arrays), out=out, **arrays)  # fmt: skip
    assert said is None, said
    return out
