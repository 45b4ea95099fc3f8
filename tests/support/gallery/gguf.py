"""GGUF files: keys, tensors, vocabularies and blocks that are wrong."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_values import Value, f32, string, strings, u32
from qtool.formats.gguf_writer import TensorSpec, lay_out
from qtool.gguf_types import BlockType
from support.gallery.case import Broken

UP = "blk.2.ffn_up.weight"


@dataclass
class Stored:
    """One tensor with its bytes, uint8 [rows, bytes of a row]."""

    shape: tuple[int, ...]
    type: BlockType
    data: NDArray[np.uint8]


@contextmanager
def edited(path: Path) -> Iterator[tuple[dict[str, Value], dict[str, Stored]]]:
    """Metadata and tensors, to be changed; the file is written anew."""
    with GgufFile.open(path) as file:
        metadata = dict(file.metadata)
        tensors = {
            name: Stored(info.shape, info.type, file.read_rows(name, 0, info.rows))
            for name, info in file.tensors.items()
        }
        yield metadata, tensors
        layout = lay_out(metadata, [TensorSpec(n, t.shape, t.type) for n, t in tensors.items()])
    content = bytearray(layout.size)
    content[: len(layout.header)] = layout.header
    for start, tensor in zip(layout.starts, tensors.values(), strict=True):
        content[start : start + tensor.data.nbytes] = tensor.data.tobytes()
    path.write_bytes(content)


def key(name: str, value: Value | None) -> Callable[[Path], None]:
    """One key says something else, or is lost."""

    def damage(path: Path) -> None:
        with edited(path) as (metadata, _):
            assert name in metadata
            metadata[name] = value or metadata[name]
            if value is None:
                del metadata[name]

    return damage


def lost(*names: str) -> Callable[[Path], None]:
    """Tensors are not there."""

    def damage(path: Path) -> None:
        with edited(path) as (_, tensors):
            for name in [n for n in tensors if n.startswith(names)]:
                del tensors[name]

    return damage


def numbers(name: str, at: int, value: float) -> Callable[[Path], None]:
    """A float16 of every block of a tensor's first row."""

    def damage(path: Path) -> None:
        with edited(path) as (_, tensors):
            tensor = tensors[name]
            blocks = tensor.data[0].reshape(-1, tensor.type.nbytes)
            blocks[:, at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)

    return damage


def tokens(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    """The vocabulary has another number of tokens."""

    def damage(path: Path) -> None:
        with edited(path) as (metadata, _):
            found = list(metadata["tokenizer.ggml.tokens"].value)
            metadata["tokenizer.ggml.tokens"] = strings(change(found))

    return damage


def cut(path: Path) -> None:
    """The download broke off."""
    path.write_bytes(path.read_bytes()[:-100_000])


def joined(path: Path) -> None:
    """Something lies behind the last tensor."""
    path.write_bytes(path.read_bytes() + bytes(4999) + b"x")


def swapped(path: Path) -> None:
    """Two tensors under each other's names."""
    with edited(path) as (_, tensors):
        one, other = "blk.1.attn_k.weight", "blk.1.attn_output.weight"
        tensors[one], tensors[other] = tensors[other], tensors[one]


def infinite_norm(path: Path) -> None:
    """A float tensor with numbers that are none."""
    with edited(path) as (_, tensors):
        tensors["output_norm.weight"].data[:] = np.frombuffer(
            np.float32(np.inf).tobytes() * 256, np.uint8
        )


def _half(found: list[str]) -> list[str]:
    return found[:1000]


def _more(found: list[str]) -> list[str]:
    return [*found, *(f"<extra_{n}>" for n in range(8))]


EPSILON = "llama.attention.layer_norm_rms_epsilon"
HEADS = "llama.attention.head_count"
LACK, NEED = "the metadata lack", "that llama needs"


def _of(name: str, check: str, damage: Callable[[Path], Any], *said: str, **more: Any) -> Broken:
    where = "llama.cpp refuses or babbles"
    return Broken(f"gguf-{name}", where, "gguf", damage, check, *said, **more)


CASES = [
    _of("block-count-lost", "keys", key("llama.block_count", None), "block_count", LACK),
    _of("heads-lost", "keys", key(HEADS, None), "head_count", LACK),
    _of("epsilon-lost", "keys", key(EPSILON, None), "rms_epsilon", LACK),
    _of("epsilon-of-nan", "keys", key(EPSILON, f32(float("nan"))), "rms_epsilon", "is nan"),
    _of("more-blocks-than-there-are", "tensors", key("llama.block_count", u32(5)), "blk.4", NEED),
    _of("heads-of-another-model", "tensors", key(HEADS + "_kv", u32(4)), "attn_k",
        r"is \[128, 256\], and by the metadata it should be \[256, 256\]"),
    _of("architecture-unknown", "engine-architecture", key("general.architecture", string("lama")),
        "lama", "has no code", engine="llama.cpp"),
    _of("goes-on", "keys", joined, "", "goes on for 5,000 bytes behind", severity="warning"),
    _of("tokens-lost", "tokenizer", tokens(_half), "tokens", "1000"),
    _of("tokens-too-many", "tokenizer", tokens(_more), "tokens", "2056"),
    _of("end-beyond-vocabulary", "tokenizer", key("tokenizer.ggml.eos_token_id", u32(32000)),
        "eos_token_id", "32000"),
    _of("tensor-lost", "tensors", lost(UP), UP, NEED),
    _of("block-lost", "tensors", lost("blk.3."), "blk.3", NEED),
    _of("embedding-lost", "tensors", lost("token_embd"), "token_embd", NEED),
    _of("shapes-swapped", "tensors", swapped, "blk.1.attn_k", "by the metadata it should be"),
    _of("scale-of-nan", "values", numbers(UP, 0, float("nan")), UP, "NaN|finite"),
    _of("scale-of-infinity", "values", numbers(UP, 2, float("inf")), UP, "NaN|finite"),
    _of("norm-of-infinity", "values", infinite_norm, "output_norm.weight", "NaN|finite"),
    _of("cut", "readable", cut, "gguf", "the file is truncated"),
]  # fmt: skip
