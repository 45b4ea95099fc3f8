"""Damage drawn at random: what disks, downloads, tools and people do to an artifact.

`draw(rng, path)` damages the artifact at `path` in place and says what it did.
"""

import json
import random
import struct
from dataclasses import dataclass
from pathlib import Path

from qtool.formats.gguf_file import GgufFile
from support.verification.damaged_settings import CONFIGS, GGUF
from support.verification.damaged_tensors import PAGE, TENSORS, Draw


@dataclass(frozen=True)
class Damage:
    """What was done, and to which tensor, key or file."""

    kind: str
    named: str


def weight_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


# Bytes of a file.


def _data_start(file: Path) -> int:
    """Where the numbers begin; of a GGUF file, about."""
    content = file.read_bytes()
    if content[:4] == b"GGUF":
        with GgufFile.open(file) as opened:
            return int(min(info.start for info in opened.tensors.values()))
    return 8 + int(struct.unpack("<Q", content[:8])[0])


def _at(file: Path, offset: int) -> str:
    """The tensor that holds a byte of a file."""
    if file.suffix == ".gguf":
        with GgufFile.open(file) as opened:
            return next(
                (n for n, i in opened.tensors.items() if i.start <= offset < i.start + i.nbytes), ""
            )
    content = file.read_bytes()
    start = 8 + int(struct.unpack("<Q", content[:8])[0])
    for name, info in json.loads(content[8:start]).items():
        if name != "__metadata__":
            first, last = info["data_offsets"]
            if start + first <= offset < start + last:
                return str(name)
    return ""


def flipped_bit(rng: random.Random, path: Path) -> str | None:
    file = rng.choice(weight_files(path))
    content = bytearray(file.read_bytes())
    at = rng.randrange(_data_start(file), len(content))
    name = _at(file, at)
    content[at] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    return name


def flipped_header(rng: random.Random, path: Path) -> str | None:
    file = rng.choice(weight_files(path))
    content = bytearray(file.read_bytes())
    at = rng.randrange(0, _data_start(file))
    content[at] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    return file.name


def _page(rng: random.Random, file: Path) -> int | None:
    first, size = -(-_data_start(file) // PAGE), file.stat().st_size // PAGE
    return rng.randrange(first, size) * PAGE if size > first else None


def zeroed_page(rng: random.Random, path: Path) -> str | None:
    file = rng.choice(weight_files(path))
    at = _page(rng, file)
    if at is None:
        return None
    name = _at(file, at)
    content = bytearray(file.read_bytes())
    content[at : at + PAGE] = bytes(PAGE)
    file.write_bytes(content)
    return name


def swapped_pages(rng: random.Random, path: Path) -> str | None:
    file = rng.choice(weight_files(path))
    one, two = _page(rng, file), _page(rng, file)
    if one is None or two is None or one == two:
        return None
    name = _at(file, one)
    content = bytearray(file.read_bytes())
    a, b = content[one : one + PAGE], content[two : two + PAGE]
    content[one : one + PAGE], content[two : two + PAGE] = b, a
    file.write_bytes(content)
    return name


def truncated(rng: random.Random, path: Path) -> str | None:
    file = rng.choice(weight_files(path))
    size = file.stat().st_size
    kept = rng.choice([rng.randrange(size), size - rng.randrange(1, 64), rng.randrange(1, 5000)])
    file.write_bytes(file.read_bytes()[: min(kept, size - 1)])
    return file.name


def trailing(rng: random.Random, path: Path) -> str | None:
    file = rng.choice(weight_files(path))
    more = rng.choice([1, 8, 4096])
    file.write_bytes(file.read_bytes() + rng.choice([bytes(more), rng.randbytes(more)]))
    return file.name


BYTES: tuple[Draw, ...] = (
    flipped_bit, flipped_header, zeroed_page, swapped_pages, truncated, trailing,
)  # fmt: skip


def draw(rng: random.Random, path: Path) -> Damage:
    """Damage the artifact at `path` in one way."""
    while True:
        kinds = rng.choice([BYTES, GGUF] if path.is_file() else [BYTES, TENSORS, TENSORS, CONFIGS])
        kind = rng.choice(kinds)
        named = kind(rng, path)
        if named is not None:
            return Damage(kind.__name__, named)
