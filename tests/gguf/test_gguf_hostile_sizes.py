"""Hostile GGUF files that are large: at every limit, of a hundred gigabytes, cut anywhere."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from qtool.errors import FormatError
from qtool.formats import gguf_cursor, gguf_header
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_values import Kind
from support.gguf.gguf_bytes import Gguf, array, entry, info, text
from support.gguf.gguf_lies import ARCH, U32, U64


def test_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """A download that stopped: every shorter file is refused as truncated."""
    whole = bytes(
        Gguf(
            [ARCH, array("t", Kind.STRING, ["a", "bc", ""]), entry("f", Kind.FLOAT32, 1.0)],
            [info("x", [2, 4]), info("y", [3], 1, 32)],
            bytes(38),
        )
    )
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    GgufFile.open(path).close()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError, match=r"would end at byte|truncated|damaged|empty"):
            GgufFile.open(path)


# Files at the limits of what is read. Each is opened by a process of its own that says what it
# took above a process that opens a small one.
MEASURE = """
import resource, sys, time
from qtool.errors import FormatError
from qtool.formats.gguf_file import GgufFile

def peak():
    # Where Linux tells it: ru_maxrss begins with what the parent had when it forked.
    try:
        lines = open("/proc/self/status").read().splitlines()
    except OSError:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

GgufFile.open(sys.argv[1]).close()
before = peak()
start = time.process_time()
try:
    GgufFile.open(sys.argv[2])
except FormatError as error:
    print(error)
took = time.process_time() - start
print(took, peak() - before)
"""


def _measured(small: Path, path: Path) -> tuple[str, float, int]:
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    message, figures = result.stdout.splitlines()
    seconds, size = figures.split()
    return message, float(seconds), int(size)


def _everything_at_its_limit() -> bytes:
    """As much as is read, and the lie at the very end: the last tensor overlaps the first."""
    tokens = gguf_cursor.MAX_ARRAY_STRINGS
    entries = [
        ARCH,
        array("tokens", Kind.STRING, bytes(8 * tokens), tokens),
        array("scores", Kind.UINT8, bytes(10_000_000), 10_000_000),
        entry("text", Kind.STRING, "\U0001f600" + "x" * 3_300_000),
    ]
    entries += [
        entry(f"key.{i:060}", Kind.UINT64, i) for i in range(gguf_header.MAX_KEYS - len(entries))
    ]
    count = gguf_header.MAX_TENSORS
    infos = [info(f"tensor.{i:017}", [8], 0, 32 * i) for i in range(count - 1)]
    return bytes(Gguf(entries, [*infos, info("last", [8])], bytes(32 * count)))


def _sparse(path: Path, head: bytes, size: int = 100 << 30) -> Path:
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(size)
    return path


def test_at_the_limits(tmp_path: Path) -> None:
    small = tmp_path / "small.gguf"
    small.write_bytes(bytes(Gguf()))
    big = tmp_path / "big.gguf"
    big.write_bytes(_everything_at_its_limit())
    message, seconds, size = _measured(small, big)
    assert "tensor 'last' begins at byte" in message or "inside the tensor 'last'" in message
    assert seconds < 1 and size < 100e6, (seconds, size)


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        (array("k", Kind.STRING, b"", 2_000_000), "is ''; expected a name"),
        (array("k", Kind.STRING, b"", 10**9), "has 1000000000 strings; at most 2000000"),
        (array("k", Kind.UINT8, b"", 10**10), "would end at byte .*; at most 32000000 bytes of"),
        (array("k", Kind.BOOL, b"", 31_000_000), "is ''; expected a name"),
        (array("k", Kind.FLOAT64, b"", 3_900_000), "is ''; expected a name"),
        (array("k", Kind.STRING, text("a", 10**10), 3), "would end at byte .*; at most 32000000"),
        (text("k") + U32(Kind.STRING) + U64(10**10), "is 10000000000 bytes long; at most 4000000"),
    ],
    ids=[
        "empty strings",
        "a billion",
        "bytes",
        "truth",
        "doubles",
        "one string of an array",
        "text",
    ],
)
def test_a_hole_of_a_hundred_gigabytes(entries: bytes, sentence: str, tmp_path: Path) -> None:
    """Lengths that a sparse file makes true, at the price of a few bytes on the disk."""
    small = tmp_path / "small.gguf"
    small.write_bytes(bytes(Gguf()))
    head = Gguf([ARCH, entries], (), keys=3).header()
    try:
        path = _sparse(tmp_path / "m.gguf", head)
    except OSError:
        pytest.skip("the file system has no files of 100 GB")
    message, seconds, size = _measured(small, path)
    with pytest.raises(FormatError, match=sentence):
        raise FormatError(message)
    assert seconds < 1 and size < 100e6, (seconds, size)


def test_a_tensor_of_a_hundred_gigabytes_costs_nothing_to_open(tmp_path: Path) -> None:
    head = bytes(Gguf(infos=[info("x", [1 << 20, 25_000])], data=b""))
    try:
        path = _sparse(tmp_path / "m.gguf", head, len(head) + 100_000 * (1 << 20))
    except OSError:
        pytest.skip("the file system has no files of 100 GB")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with GgufFile.open(path) as file:
        assert file.tensors["x"].nbytes == 100_000 << 20
        assert not file.read_rows("x", (1 << 20) - 3, 1 << 20).any()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000
