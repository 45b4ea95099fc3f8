"""Small GGUF models of made-up weights, that llama.cpp takes for Llama and Mixtral.

Weights come from integer arithmetic alone, so that digests of what is made of them hold everywhere.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.formats.gguf_header import Header, read_header
from qtool.formats.gguf_values import Value, f32, string, strings, u32
from qtool.formats.gguf_writer import GgufWriter, TensorSpec, lay_out
from qtool.gguf.importance.imatrix import Importance, write_importance
from qtool.gguf_types import BF16, F16, F32, BlockType

LAYERS, WIDTH, FEED, HEADS, KV_HEADS, VOCABULARY = 8, 256, 512, 8, 2, 64
SMALL = {"dense": 0, "experts": 4}  # experts of the models in gguf_files.json
SMALL_LAYERS = 2


def hashed(shape: tuple[int, ...], seed: int) -> NDArray[np.uint64]:
    """32 bits for each element, well mixed."""
    state = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(seed * 1_000_003)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        state ^= state >> np.uint64(shift)
        state = (state * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return (state ^ (state >> np.uint64(16))).reshape(shape)


def weights(shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Like a bell: sums of four numbers, with scales that differ from column to column."""
    total = np.zeros(shape, np.float32)
    for part in range(4):
        total += (hashed(shape, 4 * seed + part) >> np.uint64(16)).astype(np.float32)
    spread = 1 + (np.arange(shape[-1]) % 7).astype(np.float32)
    return (total * np.float32(2.0**-16) - np.float32(2)) * spread * np.float32(1 / 64)


def stored(values: NDArray[np.float32], type_: BlockType) -> NDArray[np.uint8]:
    """Rows of bytes; bfloat16 by cutting off, which these tests need no better."""
    values = values.reshape(-1, values.shape[-1])
    if type_.name in ("I64", "F64"):
        return values.astype(np.int64 if type_.name == "I64" else np.float64).view(np.uint8)
    if type_ == BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(np.float16 if type_ == F16 else np.float32).view(np.uint8)


def write(
    path: Path,
    metadata: Mapping[str, Value],
    tensors: Mapping[str, tuple[NDArray[np.float32], BlockType]],
) -> Path:
    """A file of these tensors, in this order."""
    specs = [TensorSpec(name, array.shape, type_) for name, (array, type_) in tensors.items()]
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        writer = GgufWriter(descriptor, lay_out(metadata, specs))
        for number, (array, type_) in enumerate(tensors.values()):
            writer.rows(number, 0, stored(array, type_))
        writer.finish()
    finally:
        os.close(descriptor)
    return path


def llama(layers: int = LAYERS, experts: int = 0) -> dict[str, Value]:
    """The keys without which llama.cpp loads no model."""
    sizes = {
        "block_count": layers, "context_length": 128, "embedding_length": WIDTH,
        "feed_forward_length": FEED, "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS, "vocab_size": VOCABULARY,
    }  # fmt: skip
    if experts:
        sizes |= {"expert_count": experts, "expert_used_count": 2}
    return {
        "general.architecture": string("llama"),
        **{f"llama.{key}": u32(value) for key, value in sizes.items()},
        "llama.attention.layer_norm_rms_epsilon": f32(1e-5),
        "tokenizer.ggml.model": string("no_vocab"),
        "made.up": strings(["a", "b"]),
    }


def model(path: Path, experts: int = 0, layers: int = LAYERS, type_: BlockType = F16) -> Path:
    """A model of `layers` blocks, without or with experts; 8 layers: 5 million weights."""
    tensors: dict[str, tuple[NDArray[np.float32], BlockType]] = {}

    def add(name: str, *shape: int, exact: bool = False) -> None:
        kept = F32 if exact or len(shape) == 1 else type_
        tensors[name] = (weights(shape, len(tensors)), kept)

    add("token_embd.weight", VOCABULARY, WIDTH)
    for block in range(layers):
        b = f"blk.{block}."
        kv = WIDTH // HEADS * KV_HEADS
        add(b + "attn_norm.weight", WIDTH)
        add(b + "ffn_down" + ("_exps" if experts else "") + ".weight",
            *((experts,) if experts else ()), WIDTH, FEED)  # fmt: skip
        for part in ("gate", "up"):
            add(f"{b}ffn_{part}" + ("_exps" if experts else "") + ".weight",
                *((experts,) if experts else ()), FEED, WIDTH)  # fmt: skip
        if experts:
            add(b + "ffn_gate_inp.weight", experts, WIDTH, exact=True)
        add(b + "ffn_norm.weight", WIDTH)
        add(b + "attn_q.weight", WIDTH, WIDTH)
        add(b + "attn_k.weight", kv, WIDTH)
        add(b + "attn_v.weight", kv, WIDTH)
        add(b + "attn_output.weight", WIDTH, WIDTH)
    add("output_norm.weight", WIDTH)
    add("output.weight", VOCABULARY, WIDTH)
    return write(path, llama(layers, experts), tensors)


def importance(path: Path) -> Importance:
    """Made-up importance for every matrix in the blocks of the model at `path`."""
    sums = {}
    counts = {}
    for number, info in enumerate(header(path).tensors):
        if info.name.startswith("blk.") and len(info.shape) > 1 and "gate_inp" not in info.name:
            matrices = info.shape[0] if len(info.shape) == 3 else 1
            drawn = hashed((matrices, info.shape[-1]), 77 + number) % np.uint64(1000)
            sums[info.name] = (drawn.astype(np.float32) + 1) ** 2 / np.float32(256)
            counts[info.name] = np.arange(matrices, dtype=np.int64) + 3
    return Importance(sums, counts, ("made up",), 1, 128)


def header(path: Path) -> Header:
    """The header of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_header(descriptor, path)
    finally:
        os.close(descriptor)


def data(path: Path) -> bytes:
    """Everything behind the header, padding between tensors included."""
    with path.open("rb") as file:
        file.seek(header(path).data_start)
        return file.read()


def small(folder: Path) -> Path:
    """dense.gguf and experts.gguf in a folder, each with importance."""
    for name, experts in SMALL.items():
        path = model(folder / f"{name}.gguf", experts, SMALL_LAYERS)
        write_importance(folder / f"{name}-imatrix.gguf", importance(path))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all small ones."""
    return small(tmp_path_factory.mktemp("gguf"))
