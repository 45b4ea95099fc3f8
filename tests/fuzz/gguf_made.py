"""GGUF files for the fuzzer: true ones, models that are a little wrong, and lies about either."""

import math
import random
import struct

# Numbers at which readers have gone wrong.
NUMBERS = [
    *(0, 1, 2, 3, 7, 8, 9, 12, 13, 31, 32, 33, 255, 256, 4096, 65535, 65536, 2**31 - 1, 2**31),
    *(2**32 - 1, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 8, 2**64 - 1),
]


def true_file(choose: random.Random) -> bytes:
    """A file without a lie, of all kinds of values and types."""
    from qtool.formats.gguf_values import STRUCT, Kind
    from qtool.gguf_types import TENSOR_TYPES
    from support.gguf.gguf_bytes import Gguf, array, entry, info

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


def wrong_model(choose: random.Random) -> bytes:
    """A whole model, but for some keys and tensors."""
    from qtool.formats.gguf_values import STRUCT, Kind
    from qtool.gguf_types import TENSOR_TYPES
    from support.gguf import gguf_small
    from support.gguf.gguf_small import ARCHITECTURES, TOKENIZERS

    plain = [kind for kind in Kind if kind is not Kind.ARRAY]
    blocks = choose.choice([1, 1, 2])
    tokenizer = choose.choice(list(TOKENIZERS))
    keys, tensors = gguf_small.model(choose.choice(ARCHITECTURES), tokenizer, blocks)
    types = {}

    def value(kind: Kind) -> object:
        if kind is Kind.STRING:
            words = ["", "a", "llama", "gpt2", "default", "yarn", "linear", "longrope", "0", "\0"]
            return choose.choice(words)
        if kind in (Kind.FLOAT32, Kind.FLOAT64):
            return choose.choice([0.0, 1.0, -1.0, 0.5, 4.0, 1e-30, 3e38, math.inf, math.nan])
        if kind is Kind.BOOL:
            return choose.random() < 0.5
        size = 8 * struct.calcsize(STRUCT[kind])
        number = choose.choice([0, 1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 64, 1000, *NUMBERS]) % 2**size
        return (
            number - 2**size
            if kind.name.startswith("INT") and number >= 2 ** (size - 1)
            else number
        )

    for _ in range(choose.choice([0, 1, 1, 1, 2, 2, 3, 6])):
        lie = choose.randrange(10)
        key = choose.choice(list(keys))
        name = choose.choice(list(tensors))
        if lie <= 2:
            same = keys[key][0] if choose.random() < 0.6 else Kind.ARRAY
            kind = choose.choice(plain) if same is Kind.ARRAY else same
            keys[key] = (kind, value(kind))
        elif lie == 3:
            kind = choose.choice(plain)
            count = choose.choice([0, 1, 2, 8, 200])
            keys[key] = (Kind.ARRAY, kind, [value(kind) for _ in range(count)])
        elif lie == 4:
            del keys[key]
        elif lie == 5:
            own = str(keys.get("general.architecture", (0, "llama"))[1])
            kind = choose.choice(plain)
            keys[choose.choice(MORE_KEYS).replace("ARCH", own)] = (kind, value(kind))
        elif lie == 6:
            del tensors[name]
        elif lie == 7:
            old = tensors.pop(name)
            instead = [name.replace("weight", "bias"), name.replace("blk.0.", "blk.1."), "x.weight",
                       "rope_freqs.weight", "rope_factors_long.weight"]  # fmt: skip
            tensors[choose.choice(instead)] = old
        elif lie == 8:
            shape = list(tensors[name])
            at = choose.randrange(len(shape))
            shape[at] = max(1, choose.choice([1, 2, 31, 32, shape[at] - 1, 2 * shape[at]]))
            extra = choose.choice([(), (), (), (1,), (3,), (1, 2)])
            tensors[name] = (*extra, *shape)[-4:]
        else:
            kind_of = choose.choice(list(TENSOR_TYPES.values()))
            if tensors[name][-1] % kind_of.weights == 0:
                types[name] = kind_of
        if not keys or not tensors:
            break
    fitting = {n: t for n, t in types.items() if n in tensors and tensors[n][-1] % t.weights == 0}
    return gguf_small.content(keys, tensors, fitting)


# Keys that a model may have beyond its own.
MORE_KEYS = [
    *(f"ARCH.{key}" for key in (
        "attention.key_length", "attention.value_length", "attention.sliding_window",
        "attention.sliding_window_pattern", "attn_logit_softcapping", "expert_count",
        "expert_used_count", "expert_feed_forward_length", "final_logit_softcapping",
        "nextn_predict_layers", "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa",
        "rope.scaling.attn_factor", "rope.scaling.factor", "rope.scaling.finetuned",
        "rope.scaling.original_context_length", "rope.scaling.type", "rope.scaling.yarn_ext_factor",
        "tensor_data_layout", "use_parallel_residual", "vocab_size", "anything")),
    *(f"tokenizer.ggml.{key}" for key in (
        "add_bos_token", "add_eos_token", "add_space_prefix", "bos_token_id", "eos_token_id",
        "eot_token_id", "merges", "model", "padding_token_id", "pre", "precompiled_charsmap",
        "remove_extra_whitespaces", "scores", "token_type", "tokens", "unknown_token_id")),
    "general.architecture", "general.name", "general.file_type", "general.alignment",
    "general.quantization_version", "general.type", "tokenizer.chat_template",
    "tokenizer.chat_template.x", "tokenizer.chat_templates", "qtool.recipe", "qtool.version",
    "quantize.imatrix.file",
]  # fmt: skip


def lied(content: bytes, choose: random.Random) -> bytes:
    """The file with a lie more; in the header more often than behind it."""
    raw = bytearray(content)
    if not raw:
        return b"GGUF"
    at = choose.randrange(min(len(raw), choose.choice([32, 256, 2048, len(raw)])))
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
