"""The header of a Llama of 70 billion weights in f16, before a hole as long as its weights."""

import struct
from pathlib import Path

from qtool.formats.gguf_values import Kind
from support.gguf.gguf_bytes import Gguf, array, entry, info, text

LAYERS, HIDDEN, FEED_FORWARD, KEYS = 80, 8192, 28672, 1024
TOKENS, MERGES = 150_000, 280_000
F16, F32 = 1, 0


def shapes() -> dict[str, tuple[int, ...]]:
    """Tensors in llama.cpp's order of writing."""
    found: dict[str, tuple[int, ...]] = {
        "output.weight": (TOKENS, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "token_embd.weight": (TOKENS, HIDDEN),
    }
    for layer in range(LAYERS):
        for name, shape in {
            "attn_k": (KEYS, HIDDEN), "attn_norm": (HIDDEN,), "attn_output": (HIDDEN, HIDDEN),
            "attn_q": (HIDDEN, HIDDEN), "attn_v": (KEYS, HIDDEN),
            "ffn_down": (HIDDEN, FEED_FORWARD), "ffn_gate": (FEED_FORWARD, HIDDEN),
            "ffn_norm": (HIDDEN,), "ffn_up": (FEED_FORWARD, HIDDEN),
        }.items():  # fmt: skip
            found[f"blk.{layer}.{name}.weight"] = shape
    return found


def write(path: Path) -> int:
    """Write the file; returns its length, most of which is a hole. OSError where files cannot be
    so long."""
    head, size = header()
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(size)
    return size


def header() -> tuple[bytes, int]:
    """The bytes before the weights, and the length of the file."""
    tokens = b"".join(text(f"Ġtoken{number}") for number in range(TOKENS))
    merges = b"".join(text(f"Ġab{number} cd{number % 977}") for number in range(MERGES))
    entries = [
        entry("general.architecture", Kind.STRING, "llama"),
        entry("general.type", Kind.STRING, "model"),
        entry("general.name", Kind.STRING, "Big Llama"),
        entry("llama.block_count", Kind.UINT32, LAYERS),
        entry("llama.context_length", Kind.UINT32, 131_072),
        entry("llama.embedding_length", Kind.UINT32, HIDDEN),
        entry("llama.feed_forward_length", Kind.UINT32, FEED_FORWARD),
        entry("llama.attention.head_count", Kind.UINT32, 64),
        entry("llama.attention.head_count_kv", Kind.UINT32, 8),
        entry("llama.rope.freq_base", Kind.FLOAT32, 500_000.0),
        entry("general.file_type", Kind.UINT32, 1),
        entry("tokenizer.ggml.model", Kind.STRING, "gpt2"),
        entry("tokenizer.ggml.pre", Kind.STRING, "llama-bpe"),
        array("tokenizer.ggml.tokens", Kind.STRING, tokens, TOKENS),
        array("tokenizer.ggml.token_type", Kind.INT32, struct.pack("<I", 1) * TOKENS, TOKENS),
        array("tokenizer.ggml.merges", Kind.STRING, merges, MERGES),
        entry("tokenizer.ggml.bos_token_id", Kind.UINT32, TOKENS - 256),
        entry("tokenizer.ggml.eos_token_id", Kind.UINT32, TOKENS - 247),
        entry("tokenizer.chat_template", Kind.STRING, "{{ messages }}" * 400),
    ]
    infos, offset = [], 0
    for name, shape in shapes().items():
        kind, width = (F32, 4) if len(shape) == 1 else (F16, 2)
        infos.append(info(name, shape, kind, offset))
        offset += -(-width * shape[0] * (shape[1] if len(shape) > 1 else 1) // 32) * 32
    head = bytes(Gguf(entries, infos, b""))
    return head, len(head) + offset
