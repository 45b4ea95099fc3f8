"""Fuzzing the GGUF reader: nothing but a QtoolError may come out, soon and in little memory.

    python tests/fuzz/fuzz_gguf.py [--seconds 60] [--seed 0] [--atheris] [FILE ...]

Files are made by `gguf_bytes` at random, true ones, and then told lies: a number of the header
replaced, pieces cut, doubled or moved, bits flipped, a hole of gigabytes behind the end. What is
accepted has to keep its promises: tensors inside the file and apart, arrays that decode and encode
to their own bytes, rows that can be read, an inspection that prints. With --atheris libFuzzer
chooses the lies by what they reach in the reader (it has to be installed for this Python). A FILE
is only tried. Exit status 1 at the first failure, whose file is kept beside the working directory.
"""

import argparse
import itertools
import json
import math
import random
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

SECONDS, BYTES = 1.0, 100e6
_TRIED: Counter[str] = Counter()
# Numbers at which readers have gone wrong.
NUMBERS = [
    *(0, 1, 2, 3, 7, 8, 9, 12, 13, 31, 32, 33, 255, 256, 4096, 65535, 65536, 2**31 - 1, 2**31),
    *(2**32 - 1, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 8, 2**64 - 1),
]


def true_file(choose: random.Random) -> bytes:
    """A file without a lie, of all kinds of values and types."""
    from gguf_bytes import Gguf, array, entry, info

    from qtool.formats.gguf_values import STRUCT, Kind
    from qtool.gguf_types import TENSOR_TYPES

    def value(kind: Kind) -> object:
        if kind is Kind.STRING:
            return choose.choice(["", "a", "Ġthe", "x" * choose.randrange(300), "\0", b"\xff\xc3"])
        return struct.unpack(
            "<" + STRUCT[kind],
            bytes(choose.randrange(2 if kind is Kind.BOOL else 256) for _ in range(8))[
                : struct.calcsize("<" + STRUCT[kind])
            ],
        )[0]

    keys = ["general.architecture", "general.name", "general.file_type", "general.type",
            "split.no", "split.count", "tokenizer.ggml.tokens", "tokenizer.ggml.model",
            "tokenizer.ggml.bos_token_id", "imatrix.chunk_count", "imatrix.chunk_size",
            "imatrix.datasets", "quantize.imatrix.file", "tokenizer.chat_template",
            "qtool.version"]  # fmt: skip
    kinds = [kind for kind in Kind if kind is not Kind.ARRAY]
    entries = [entry("general.architecture", Kind.STRING, "llama")]
    if choose.random() < 0.2:
        entries.append(entry("general.type", Kind.STRING, choose.choice(["imatrix", "adapter"])))
    width = 2 ** choose.randrange(8) if choose.random() < 0.2 else 32
    if width != 32:
        entries.append(entry("general.alignment", Kind.UINT32, width))
    for number in range(choose.randrange(6)):
        key = choose.choice(keys[1:]) if choose.random() < 0.5 else f"key.{number}"
        if any(key.encode() in one for one in entries):
            continue
        kind = choose.choice(kinds)
        if choose.random() < 0.4:
            entries.append(array(key, kind, [value(kind) for _ in range(choose.randrange(12))]))
        else:
            entries.append(entry(key, kind, value(kind)))
    infos, data = [], b""
    for number in range(choose.randrange(6)):
        block = choose.choice(list(TENSOR_TYPES.values()))
        shape = [choose.randrange(1, 4) for _ in range(choose.randrange(3))]
        suffix = choose.choice(["weight", "weight.counts", "weight.in_sum2"])
        shape.append(choose.randrange(1, 4) * block.weights)
        infos.append(info(f"blk.{number}.{suffix}", shape, block.number, len(data)))
        size = math.prod(shape) // block.weights * block.nbytes
        data += choose.randbytes(size) + bytes(-size % width)
    version = choose.choice([2, 3])
    return bytes(Gguf(entries, infos, data, version=version, alignment=width))


def lied(content: bytes, choose: random.Random) -> bytes:
    """The file with a lie more; in the header more often than behind it."""
    raw = bytearray(content)
    if not raw:
        return b"GGUF"
    at = choose.randrange(min(len(raw), choose.choice([32, 256, len(raw)])))
    kind = choose.randrange(9)
    if kind <= 3:  # a number, at any place and of any width
        number = choose.choice([*NUMBERS, len(raw), len(raw) - at, choose.getrandbits(64)])
        width = choose.choice([1, 4, 4, 8, 8])
        raw[at : at + width] = (number % 256**width).to_bytes(width, "little")
    elif kind == 4:
        raw[at] ^= 1 << choose.randrange(8)
    elif kind == 5:
        del raw[at:]
    elif kind == 6:
        del raw[at : at + choose.choice([1, 4, 8, 16, 33])]
    elif kind == 7:  # a piece once more, or another one in its place
        length = choose.choice([8, 16, 40, 100])
        to = choose.randrange(len(raw))
        raw[to : to + choose.choice([0, length])] = raw[at : at + length]
    else:
        raw[at:at] = choose.choice([b"\0" * 8, choose.randbytes(13), b"GGUF", b"\xff" * 8])
    return bytes(raw)


def attempt(path: Path) -> str:
    """Open the file and use it in every way; says how it went. Raises where that went wrong."""
    from qtool.errors import QtoolError
    from qtool.formats.gguf_file import GgufFile

    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        with GgufFile.open(path) as file:
            keep_promises(file)
        outcome = "accepted"
    except QtoolError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 2000, message
        outcome = "refused"
    took = time.process_time() - start
    unit = 1 if sys.platform == "darwin" else 1024
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    assert took < SECONDS, f"{took:.2f} s"
    assert grown < BYTES, f"{grown / 1e6:.0f} MB"
    return outcome


def keep_promises(file: "object") -> None:
    """What was accepted is as the reader says."""
    from qtool.errors import SourceError
    from qtool.formats.gguf_arrays import StoredArray
    from qtool.formats.gguf_file import GgufFile
    from qtool.formats.gguf_values import STRUCT, Kind
    from qtool.gguf.from_gguf import gguf_source
    from qtool.gguf.inspect import GgufInspection, tensor_detail
    from qtool.gguf.inspect_text import detail_lines, summary, tables

    assert isinstance(file, GgufFile)
    ends = dict.fromkeys(file.files, 0)
    for one in sorted(file.tensors.values(), key=lambda tensor: tensor.start):
        assert ends[one.file] <= one.start and one.nbytes > 0
        ends[one.file] = one.start + one.nbytes
        assert ends[one.file] <= one.file.stat().st_size and one.rows * one.row_bytes == one.nbytes
        if one.nbytes < 1 << 20:
            rows = file.read_rows(one.name, 0, one.rows)
            assert rows.shape == (one.rows, one.row_bytes)
            assert all(line.isprintable() for line in detail_lines(tensor_detail(file, one.name)))
    for value in file.metadata.values():
        array = value.value
        if not isinstance(array, StoredArray):
            continue
        if array.kind is Kind.STRING:
            raw = [text.encode("utf-8", "surrogateescape") for text in array]
            again = b"".join(struct.pack("<Q", len(text)) + text for text in raw)
        else:
            again = struct.pack(f"<{len(array)}{STRUCT[array.kind]}", *array)
        # A NaN with a message comes back as some NaN.
        floats = array.kind in (Kind.FLOAT32, Kind.FLOAT64)
        assert again == array.stored or (floats and len(again) == array.nbytes)
    found = GgufInspection(file)
    json.loads(json.dumps(found.json()), parse_constant=_no_constant)
    shown = [text for line in summary(found) for text in line]
    shown += [cell for table in tables(found, True) for row in table.rows for cell in row]
    assert all(text.isprintable() for text in shown)
    try:
        gguf_source(file)
    except SourceError:
        return


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def _try(path: Path, content: bytes, hole: int = 0) -> str:
    """Write and try it; a failure is kept."""
    path.unlink(missing_ok=True)  # some file systems flush a file that is written over
    with open(path, "wb") as file:
        file.write(content)
        if hole:
            file.truncate(len(content) + hole)
    try:
        outcome = attempt(path)
    except BaseException:
        kept = Path(f"failed-{len(content)}-{hole}.gguf")
        kept.write_bytes(content)
        print(f"failed: {kept}, followed by a hole of {hole} bytes", file=sys.stderr)
        raise
    _TRIED[outcome] += 1
    return outcome


def own(seconds: float, seed: int, path: Path, most: int | None = None) -> None:
    """At most so many lies by chance, the same for the same seed; what was accepted is lied about
    further."""
    choose = random.Random(seed)
    pool = [true_file(choose) for _ in range(200)]
    for content in pool:
        assert _try(path, content) == "accepted" or b"split.count" in content
    end = time.monotonic() + seconds
    for _ in range(most) if most is not None else itertools.count():
        if time.monotonic() > end:
            break
        if choose.random() < 0.05:
            pool[choose.randrange(len(pool))] = true_file(choose)
        content = choose.choice(pool)
        for _ in range(choose.choice([1, 1, 1, 2, 3, 6])):
            content = lied(content, choose)
        hole = 1 << choose.randrange(20, 37) if choose.random() < 0.02 else 0
        if _try(path, content, hole) == "accepted" and choose.random() < 0.2:
            pool[choose.randrange(len(pool))] = content
        if choose.random() < 0.05:
            _try_split(path.parent, choose)


def _try_split(folder: Path, choose: random.Random) -> None:
    """A true model of two parts, and lies about one of them."""
    from gguf_bytes import Gguf, entry, info

    from qtool.formats.gguf_values import Kind

    paths = [folder / f"s-0000{number}-of-00002.gguf" for number in (1, 2)]
    whole = []
    for number in range(2):
        entries = [
            entry("split.no", Kind.UINT16, number),
            entry("split.count", Kind.UINT16, 2),
            entry("split.tensors.count", Kind.INT32, 2),
            entry("general.architecture", Kind.STRING, "llama"),
        ]
        whole.append(bytes(Gguf(entries, [info(f"t{number}", [2, 4])])))
    for path, content in zip(paths, whole, strict=True):
        path.write_bytes(content)
    one = choose.randrange(2)
    assert _try(paths[one], whole[one]) == "accepted"
    for _ in range(20):
        paths[1 - one].unlink()
        paths[1 - one].write_bytes(lied(whole[1 - one], choose))
        _try(paths[one], whole[one])


def guided(seconds: float, seed: int, path: Path, folder: Path) -> None:
    """libFuzzer's choice of lies; never returns."""
    import atheris

    # What coverage is counted of has to be imported under its eyes.
    with atheris.instrument_imports(include=["qtool.formats", "qtool.gguf"]):
        import qtool.formats.gguf_arrays
        import qtool.formats.gguf_file
        import qtool.formats.gguf_header
        import qtool.gguf.inspect
        import qtool.gguf.inspect_text  # noqa: F401

    choose = random.Random(seed)
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(200):
        (corpus / f"{number}").write_bytes(true_file(choose))

    def one(data: bytes) -> None:
        _try(path, data)

    def lie(data: bytes, most: int, lie_seed: int) -> bytes:
        choice = random.Random(lie_seed)
        if choice.random() < 0.5:
            return lied(bytes(data), choice)[:most]
        mutated: bytes = atheris.Mutate(data, most)
        return mutated

    options = [f"-max_total_time={seconds:.0f}", f"-seed={seed + 1}", "-max_len=20000",
               "-timeout=10", "-print_final_stats=1"]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(corpus)], one, custom_mutator=lie)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    for file in options.files:
        print(f"{file}: {attempt(file)}")
    if options.files:
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.atheris:
            guided(options.seconds, options.seed, folder / "m.gguf", folder)
        else:
            own(options.seconds, options.seed, folder / "m.gguf")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(_TRIED.items()))
    print(f"{_TRIED.total():,} files: {counts}; no failure; peak {peak:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
