"""The machine that counts what a warp does (tests/gpu/sass_machine.py), on code written by hand."""

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent / "gpu"))

from sass_machine import Seen, Warp, read


def run(lines: list[str], *parameters: int, memory: Any = lambda *_: None) -> tuple[Warp, Seen]:
    text = "\n".join(f"/*{16 * n:04x}*/ {line} ;" for n, line in enumerate([*lines, "EXIT"]))
    special = {"SR_TID.X": np.arange(32)}
    warp = Warp(read(text), struct.pack(f"<{len(parameters)}q", *parameters), special, memory)
    return warp, warp.run()


def test_numbers() -> None:
    warp, _ = run(
        [
            "S2R R0, SR_TID.X",
            "MOV R1, 0x80000001",
            "IMAD.WIDE.U32 R2, R1, R1, RZ",
            "SHF.R.S32.HI R4, RZ, 0x4, R1",
            "LEA.HI R5, R1, R0, RZ, 0x4",
            "LOP3.LUT R6, R1, 0xf, R0, 0xf8, !PT",
            "PRMT R7, R1, 0x7440, RZ",
            "IADD3 R8, P1, R1, R1, RZ",
            "IADD3.X R9, RZ, RZ, RZ, P1, !PT",
            "ISETP.LT.AND P2, PT, R1, R0, PT",
            "SEL R10, R0, 0x7, P2",
            "FADD R11, -R4, 1.5",
        ]
    )
    lane = 5
    found = [int(warp.registers[k, lane]) for k in range(11)]
    square = 0x80000001**2
    assert found[2:4] == [square & 0xFFFFFFFF, square >> 32]
    assert found[4:8] == [0xF8000000, 8 + lane, 0x80000001 | lane, 0x1]
    assert found[8:11] == [2, 1, lane]
    bits = np.uint32(found[4]).view(np.float32)
    assert warp.registers[11, lane] == (np.float32(1.5) - bits).view(np.uint32)


def test_loops_and_branches_that_part() -> None:
    """Half of the threads go round eight times, the others four; they meet again."""
    lines = [
        "S2R R0, SR_TID.X",
        "ISETP.GE.AND P0, PT, R0, 0x10, PT",
        "SEL R1, 0x8, 0x4, P0",
        "BSSY B0, 0x70",
        "IADD3 R1, R1, -0x1, RZ",
        "ISETP.NE.AND P1, PT, R1, RZ, PT",
        "@P1 BRA 0x40",
        "BSYNC B0",
        "FADD R2, RZ, RZ",
    ]
    _, seen = run(lines)
    assert seen.issued["IADD3"] == 8
    assert seen.issued["FADD"] == 1


def test_sectors_banks_and_waits() -> None:
    """Loads side by side, and 64 bytes apart; a wait for both, and one for a load after it."""
    lines = [
        "S2R R0, SR_TID.X",
        "IMAD.SHL.U32 R1, R0, 0x10, RZ",
        "IMAD.WIDE.U32 R2, R0, 0x10, RZ",
        "IMAD.WIDE.U32 R4, R0, 0x40, RZ",
        "LDG.E.128.CONSTANT R8, desc[UR4][R2.64+0x400]",
        "LDG.E.CONSTANT R12, desc[UR4][R4.64]",
        "STS.128 [R1], R8",
        "IADD3 R13, R12, R12, RZ",
        "LDG.E.U8.CONSTANT R14, desc[UR4][R2.64]",
        "IADD3 R15, R14, R13, RZ",
        "IMAD.SHL.U32 R16, R0, 0x80, RZ",
        "LDS R17, [R16]",
    ]
    warp, seen = run(lines)
    wide, apart, stored, _, conflict = seen.accesses
    assert (wide.sectors, wide.distinct, apart.sectors, apart.distinct) == (16, 512, 32, 128)
    assert (stored.passes, conflict.passes) == (4, 32)
    assert (seen.trips, seen.in_flight) == (2, 640)
    assert warp.registers[17, 1] == warp.registers[8, 8]


def test_what_is_asked_for_before_others_are_waited_for() -> None:
    lines = ["LDC.64 R2, c[0x0][0x210]", "LDG.E.128 R4, desc[UR4][R2.64]", "ACQBULK"]
    lines += ["LDG.E R8, desc[UR4][R2.64+0x10]", "ACQBULK"]
    _, seen = run(lines, 0x1000)
    assert (seen.early, len(seen.accesses)) == (16, 2)


def test_what_memory_holds() -> None:
    def memory(where: Any, _: int) -> Any:
        return np.broadcast_to((where // 4).astype(np.uint32), (4, 32))

    lines = ["LDC.64 R2, c[0x0][0x218]", "LDG.E R4, desc[UR4][R2.64+0x8]"]
    warp, _ = run(lines, 0, 0x1000, memory=memory)
    assert warp.registers[4, 31] == 0x1008 // 4
