"""One GGUF file for each way a header can lie, each refused in one sentence that says where and
what, in under a second, in bounded memory.

Readers of this format have divided by an alignment or a dimension of zero, multiplied counts and
dimensions past 64 bits, allocated what a length promised, recursed into arrays, indexed tables by
a type's number, read past a file of four bytes, and compared tensors with the end of the file
after their sum had wrapped around (CVE-2024-21802, -21825, -21836, -23496, -23605, -39720,
CVE-2025-53630, CVE-2026-27940, CVE-2026-33298 and others): each has its file here.
"""

import os
import struct
import tracemalloc
from pathlib import Path

import pytest

from qtool.errors import FormatError
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_values import Kind
from support.gguf.gguf_bytes import Gguf, array, entry, info, text
from support.gguf.gguf_lies import (
    ARCH,
    HUGE,
    KEY,
    U32,
    U64,
    alignment,
    of_entries,
    of_infos,
    refusal,
)

LIES: dict[str, tuple[bytes, str]] = {
    # what kind of file
    "empty": (b"", "the file is empty"),
    "only the magic": (b"GGUF", "the version would end at byte 8 of a file of 4 bytes"),
    "only magic and version": (b"GGUF\3\0\0\0", "number of tensors would end at byte 16"),
    "counts cut": (b"GGUF\3\0\0\0" + bytes(12), "number of keys would end at byte 24"),
    "a safetensors file": (b'\x40\0\0\0\0\0\0\0{"w":1}', "expected b'GGUF': no GGUF file"),
    "a zip file": (b"PK\3\4" + bytes(60), r"begins with b'PK\\x03\\x04', expected b'GGUF'"),
    "lower case magic": (bytes(Gguf(magic=b"gguf")), "begins with b'gguf'"),
    "an old GGJT file": (b"tjgg" + bytes(60), "old GGJT family, from before GGUF"),
    "an old GGML file": (b"lmgg" + bytes(60), "old GGML family"),
    "a pointer of Git LFS": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "a big-endian GGUF file"),
    "big-endian throughout": (b"FUGG" + struct.pack(">IQQ", 3, 0, 0), "a big-endian GGUF file"),
    "version 1": (b"GGUF" + struct.pack("<III", 1, 0, 0), "GGUF version 1 of August 2023"),
    "version 0": (bytes(Gguf(version=0)), "GGUF version 0; versions 2 and 3 are read"),
    "version 4": (bytes(Gguf(version=4)), "GGUF version 4; versions 2 and 3 are read"),
    "version 2^32 - 1": (bytes(Gguf(version=2**32 - 1)), "GGUF version 4294967295"),
    # counts
    "2^64 - 1 tensors": (bytes(Gguf(tensors=HUGE)), f"{HUGE} tensors in a file of"),
    "2^63 keys": (bytes(Gguf(keys=2**63)), f"{2**63} metadata keys in a file of"),
    "a million keys": (bytes(Gguf(keys=10**6)), "1000000 metadata keys in a file of"),
    "keys past the limit": (
        bytes(Gguf(keys=4_097, data=bytes(10**6))),
        "4097 metadata keys in a file of .* at most 4096 are read",
    ),
    "tensors past the limit": (
        bytes(Gguf(tensors=16_385, data=bytes(2 * 10**6))),
        "16385 tensors in a file of .* at most 16384 are read",
    ),
    "one key more than there is": (Gguf(keys=2, infos=()).header(), "metadata key 1 would end at"),
    "one key fewer than there is": (
        bytes(Gguf([ARCH, entry("k", Kind.UINT64, 2**40)], keys=1, infos=(), tensors=1)),
        "the name of tensor 0|tensor 'k' has",
    ),
    "one tensor more than there is": (
        Gguf(tensors=2).header(),
        "the name of tensor 1 would end at byte",
    ),
    # keys
    "a key of 2^64 - 1 bytes": (of_entries(text("k", HUGE)), "metadata key 1 would end at byte"),
    "a key past the end": (of_entries(text("k", 10**4)), "metadata key 1 would end at byte"),
    "a key longer than keys are": (
        of_entries(entry("k" * 65_536, Kind.UINT8, 1)),
        "metadata key 1 is 65536 bytes long; at most 65535 are read",
    ),
    "an empty key": (of_entries(entry("", Kind.UINT8, 1)), "metadata key 1 is ''; expected a name"),
    "a null in a key": (
        of_entries(entry("general\0", Kind.UINT8, 1)),
        r"metadata key 1 is 'general\\x00'; expected a name without null",
    ),
    "a key that is no UTF-8": (
        of_entries(entry(b"\xff\xfe", Kind.UINT8, 1)),
        r"metadata key 1 is b'\\xff\\xfe', which is not UTF-8",
    ),
    "a key twice": (
        of_entries(entry("k", Kind.UINT8, 1), entry("k", Kind.UINT8, 2)),
        "metadata key 'k' comes twice",
    ),
    "the architecture twice": (of_entries(ARCH), "'general.architecture' comes twice"),
    # values
    "an unknown kind": (of_entries(KEY + U32(13)), "value of 'k' has the unknown kind 13"),
    "a kind of 2^32 - 1": (of_entries(KEY + U32(2**32 - 1)), "the unknown kind 4294967295"),
    "a number cut": (
        Gguf([KEY + U32(Kind.UINT64) + b"\1\2\3"], ()).header(),
        "the value of 'k' would end at byte",
    ),
    "a string of 2^64 - 1 bytes": (
        of_entries(KEY + U32(Kind.STRING) + U64(HUGE)),
        "the value of 'k' would end at byte 18446744073709551",
    ),
    "a string past the end": (
        of_entries(KEY + U32(Kind.STRING) + U64(10**6)),
        "the value of 'k' would end at byte 1000",
    ),
    "a string bomb": (
        of_entries(entry("k", Kind.STRING, "x" * 4_000_001)),
        "the value of 'k' is 4000001 bytes long; at most 4000000 are read",
    ),
    "many strings that are a bomb together": (
        of_entries(*(entry(f"k{i}", Kind.STRING, "x" * 500_000) for i in range(8))),
        r"value of 'k7' makes 40000\d\d bytes of keys, names and texts; at most 4000000",
    ),
    "a truth value of 2": (
        of_entries(KEY + U32(Kind.BOOL) + b"\2"),
        "the value of 'k' is the truth value 2, expected 0 or 1",
    ),
    # arrays
    "an array of an unknown kind": (
        of_entries(KEY + U32(Kind.ARRAY) + U32(99) + U64(1)),
        "value of 'k' has the unknown kind 99",
    ),
    "an array of arrays": (
        of_entries(KEY + (U32(Kind.ARRAY) + U32(Kind.ARRAY) + U64(1)) * 1000),
        "the value of 'k' is an array of arrays",
    ),
    "an array of 2^64 - 1 bytes": (
        of_entries(array("k", Kind.UINT8, b"", HUGE)),
        f"said to have {HUGE} elements of 1 bytes or more, and",
    ),
    "an array whose bytes overflow": (
        of_entries(array("k", Kind.FLOAT64, b"", 2**61)),
        f"said to have {2**61} elements of 8 bytes or more",
    ),
    "an array past the end": (
        of_entries(array("k", Kind.INT32, [1, 2], 10**4)),
        "said to have 10000 elements of 4 bytes or more",
    ),
    "an array of 2^61 strings": (
        of_entries(array("k", Kind.STRING, [], 2**61)),
        f"said to have {2**61} elements of 8 bytes or more",
    ),
    "strings fewer than counted": (
        Gguf([array("k", Kind.STRING, ["a"] * 9, 10)], ()).header(),
        "the value of 'k' would end at byte",
    ),
    "a string of an array past the end": (
        bytes(Gguf([array("k", Kind.STRING, text("a", HUGE) + bytes(64), 2)], (), b"", tensors=0)),
        "the value of 'k' would end at byte 18446744073709551",
    ),
    "the last string of an array past the end": (
        bytes(Gguf([array("k", Kind.STRING, text("a", 900), 1)], (), bytes(64), tensors=0)),
        "the value of 'k' would end at byte 9",
    ),
    "more strings than are read": (
        of_entries(array("k", Kind.STRING, bytes(8 * 2_000_001), 2_000_001)),
        "the value of 'k' has 2000001 strings; at most 2000000",
    ),
    "a truth value of 255 in an array": (
        of_entries(array("k", Kind.BOOL, b"\0\1\xff", 3)),
        "the value of 'k' has the truth value 255, expected 0 or 1",
    ),
    # the alignment
    "an alignment of 0": (of_entries(alignment(0)), "general.alignment is 0, expected a power of"),
    "an alignment of 24": (of_entries(alignment(24)), "general.alignment is 24, expected a power"),
    "an alignment of 2^31": (of_entries(alignment(2**31)), "is 2147483648, expected at most 65536"),
    "an alignment that is a string": (
        of_entries(entry("general.alignment", Kind.STRING, "32")),
        "general.alignment is of the kind STRING, expected UINT32",
    ),
    "an alignment that is signed": (
        of_entries(alignment(-32, Kind.INT32)),
        "general.alignment is of the kind INT32, expected UINT32",
    ),
    # names and shapes of tensors
    "a name past the end": (of_infos(text("x", 10**5)), "the name of tensor 0 would end at byte"),
    "a name of 2^64 - 1 bytes": (of_infos(text("x", HUGE)), "the name of tensor 0 would end at"),
    "a name longer than names are": (
        of_infos(info("x" * 1025, [8])),
        "the name of tensor 0 is 1025 bytes long; at most 1024 are read",
    ),
    "an empty name": (of_infos(info("", [8])), "the name of tensor 0 is ''; expected a name"),
    "a null in a name": (of_infos(info("x\0y", [8])), "expected a name without null characters"),
    "a name that is no UTF-8": (of_infos(info(b"\xc3", [8])), r"b'\\xc3', which is not UTF-8"),
    "a name twice": (
        of_infos(info("x", [8]), info("x", [8], offset=32), data=64),
        "the tensor 'x' comes twice",
    ),
    "no dimensions": (of_infos(info("x", [])), "'x' has 0 dimensions; expected 1 to 4"),
    "five dimensions": (of_infos(info("x", [1] * 5)), "'x' has 5 dimensions; expected 1 to 4"),
    "2^32 - 1 dimensions": (of_infos(info("x", [8], dims=2**32 - 1)), "has 4294967295 dimensions"),
    "a row of no weights": (of_infos(info("x", [2, 0])), r"'x' has the shape \[2, 0\]: no weights"),
    "no rows": (of_infos(info("x", [0, 4])), r"'x' has the shape \[0, 4\]: no weights at all"),
    "a product that overflows to 0": (
        of_infos(info("x", [2**32, 2**32])),
        r"shape \[4294967296, 4294967296\], whose product overflows 63 bits",
    ),
    "a product that overflows to 8": (
        of_infos(info("x", [2**61 + 1, 8])),
        "whose product overflows 63 bits",
    ),
    "a product that overflows over four": (
        of_infos(info("x", [2**16, 2**16, 2**16, 2**16])),
        "whose product overflows 63 bits",
    ),
    "a dimension that is negative to some": (
        of_infos(info("x", [1, HUGE])),
        r"shape \[1, 18446744073709551615\], whose product overflows",
    ),
    "bytes that overflow": (
        of_infos(info("x", [2**61, 2])),
        "tensor 'x' ends at byte 184467440737095",
    ),
    # types of tensors
    "an unknown type": (of_infos(info("x", [8], 43)), "'x' is of the unknown type 43"),
    "a type of 2^31": (of_infos(info("x", [8], 2**31)), "'x' is of the unknown type 2147483648"),
    "a removed type": (of_infos(info("x", [32], 31)), "type 31, Q4_0_4_4, which ggml has removed"),
    "a type never stored": (of_infos(info("x", [256], 15)), "type 15, Q8_K, which ggml never"),
    "rows that blocks do not cover": (
        of_infos(info("x", [8, 32], 12), data=144),
        "'x' is Q4_K with rows of 32 weights, which whole blocks of 256 do not cover",
    ),
    "a weight short of a block": (of_infos(info("x", [31], 2)), "Q4_0 with rows of 31 weights"),
    # places of tensors
    "an unaligned tensor": (
        of_infos(info("x", [8], offset=8), data=64),
        "'x' begins at offset 8, which is no multiple of the alignment 32",
    ),
    "unaligned by the file's own alignment": (
        bytes(Gguf([ARCH, alignment(64)], [info("x", [8], offset=32)], bytes(64), alignment=64)),
        "'x' begins at offset 32, which is no multiple of the alignment 64",
    ),
    "an offset of 2^64 - 32": (
        of_infos(info("x", [8], offset=2**64 - 32)),
        r"'x' ends at byte 18446744073709551\d\d\d of a file of",
    ),
    "data cut by one byte": (
        of_infos(info("x", [8]), data=31),
        r"'x' ends at byte \d+ of a file of \d+ bytes; the file is truncated",
    ),
    "no data": (of_infos(info("x", [8]), data=0), "the file is truncated: fetch it again"),
    "data that would begin past the end": (
        bytes(Gguf(data=b""))[:-1],
        "the file is truncated: fetch it again",
    ),
    "two tensors in one place": (
        of_infos(info("x", [8]), info("y", [8])),
        r"tensor 'y' begins at byte \d+, inside the tensor 'x', which ends at",
    ),
    "tensors that overlap by a byte": (
        of_infos(info("y", [33], 24, 32), info("x", [33], 24), data=96),
        r"tensor 'y' begins at byte \d+, inside the tensor 'x'",
    ),
    "a tensor inside a larger one": (
        of_infos(info("x", [32]), info("y", [8], offset=64), data=128),
        "tensor 'y' begins at byte .*, inside the tensor 'x'",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_is_refused(lie: str, tmp_path: Path) -> None:
    content, sentence = LIES[lie]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=sentence) as caught:
            GgufFile.open(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message, seconds = refusal(path)
    assert message == str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 500
    assert peak < 100e6 and seconds < 1


def test_what_the_lies_are_made_of_is_read(tmp_path: Path) -> None:
    """The builders make good files where nothing lies, so that each refusal is for its lie."""
    path = tmp_path / "m.gguf"
    for good in (
        bytes(Gguf()),
        bytes(Gguf(version=2)),
        of_entries(alignment(32), entry("k", Kind.BOOL, True), array("l", Kind.BOOL, [True])),
        bytes(Gguf([ARCH, alignment(64)], [info("x", [8], offset=64)], bytes(96), alignment=64)),
        of_infos(info("x", [1, 1, 1, 8])),
        of_infos(info("x", [1, 256], 12), data=144),
        of_infos(info("y", [33], 24, 64), info("x", [33], 24), data=97),  # gaps are allowed
        bytes(Gguf(infos=(), data=b"")),
        bytes(Gguf([], (), b"")),
        of_entries(array("k", Kind.STRING, []), array("n", Kind.INT64, [])),
    ):
        path.write_bytes(good)
        GgufFile.open(path).close()
    assert len(LIES) >= 75


def test_refused_before_a_key_is_decoded(tmp_path: Path) -> None:
    """A name of control characters cannot reach the terminal through an error."""
    path = tmp_path / "m.gguf"
    path.write_bytes(of_infos(info("\x1b[2J\r\nok", [8], 99)))
    message, _ = refusal(path)
    assert "\x1b" not in message and "\n" not in message and r"\x1b[2J\r\nok" in message


def test_no_descriptor_is_left_behind(tmp_path: Path) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    path = tmp_path / "m.gguf"
    path.write_bytes(LIES["two tensors in one place"][0])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        refusal(path)
    assert len(os.listdir("/proc/self/fd")) == before
