"""Configurations damaged at random, and GGUF files; see random_damage."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.formats.gguf_values import Kind, Value, strings
from support.gallery import gguf
from support.verification.damaged_tensors import PAGE, Draw

_WORDS: dict[str, tuple[str, ...]] = {
    "version": ("gemm", "gemv", "gemv_fast", "llm-awq"),
    "checkpoint_format": ("gptq", "gptq_v2"),
    "quant_method": ("awq", "gptq", "compressed-tensors", "fp8"),
    "format": ("pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized"),
    "type": ("int", "float"),
    "strategy": ("tensor", "channel", "group", "block", "token"),
    "hidden_act": ("silu", "gelu", "gelu_pytorch_tanh", "relu"),
    "activation_scheme": ("dynamic", "static"),
    "actorder": ("weight", "group"),
    "dtype": ("float16", "bfloat16", "float32"),
    "torch_dtype": ("float16", "bfloat16", "float32"),
    "rope_type": ("default", "linear", "llama3"),
    "model_type": ("llama", "mistral", "qwen2", "qwen3", "phi3"),
    # Not Mistral's, which computes what Llama's does.
    "architectures": ("LlamaForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM"),
}


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for k, v in value.items() for leaf in _leaves(v, (*path, k))]
    if isinstance(value, list) and value and path[-1] != "tokens":
        return [path, *(leaf for n, v in enumerate(value) for leaf in _leaves(v, (*path, n)))]
    return [path]


def another(rng: random.Random, key: str, value: Any) -> Any:
    """Another legal value of a key; the same where there is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value * 2, max(1, value // 2), value + 1, max(0, value - 1)])
    if isinstance(value, float):
        return rng.choice([value * 10, value / 10, value * 2, value + 1])
    if isinstance(value, str):
        return rng.choice([w for w in _WORDS.get(key, ()) if w != value] or [value])
    if isinstance(value, list):
        return rng.choice([value[1:], [*value, *value[:1]], []])
    return value


def _changed(rng: random.Random, file: Path, inside: tuple[str, ...]) -> str | None:
    content = json.loads(file.read_text())
    inner = content
    for key in inside:
        if not isinstance(inner.get(key), dict):
            return None
        inner = inner[key]
    if not inside:
        inner = {k: v for k, v in content.items() if k != "quantization_config"}
    leaf = rng.choice(_leaves(inner))
    at = content
    for key in (*inside, *leaf[:-1]):
        at = at[key]
    key = next(str(k) for k in reversed(leaf) if isinstance(k, str))
    said = ".".join(map(str, (*inside, *leaf)))
    if rng.random() < 0.1 and isinstance(at, dict) and at[leaf[-1]]:  # what is not said is false
        del at[leaf[-1]]
        said += " left out"
    else:
        value = another(rng, key, at[leaf[-1]])
        if value == at[leaf[-1]]:
            return None
        at[leaf[-1]] = value
    file.write_text(json.dumps(content))
    return said


def quantization_changed(rng: random.Random, path: Path) -> str | None:
    return _changed(rng, path / "config.json", ("quantization_config",))


def config_changed(rng: random.Random, path: Path) -> str | None:
    return _changed(rng, path / "config.json", ())


def tokens_exchanged(rng: random.Random, path: Path) -> str | None:
    """The tokenizer of a model with the same number of tokens: other ids."""
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):
        return None
    names = [n for n in vocabulary if n != content["model"].get("unk_token")]
    some = names if rng.random() < 0.5 else rng.sample(names, 2)
    ids = [vocabulary[n] for n in some]
    vocabulary |= dict(zip(some, [*ids[1:], *ids[:1]], strict=True))
    file.write_text(json.dumps(content))
    return "tokenizer.json"


def gguf_left_out(rng: random.Random, path: Path) -> str | None:
    with gguf.edited(path) as (_, tensors):
        name = rng.choice(sorted(tensors))
        del tensors[name]
    return name


def gguf_renamed(rng: random.Random, path: Path) -> str | None:
    with gguf.edited(path) as (_, tensors):
        name = rng.choice(sorted(tensors))
        tensors[f"{name}_old"] = tensors.pop(name)
    return name


def gguf_doubled(rng: random.Random, path: Path) -> str | None:
    with gguf.edited(path) as (_, tensors):
        name = rng.choice(sorted(tensors))
        tensors[f"copy.{name}"] = tensors[name]
    return name


def _gguf_pair(
    rng: random.Random, tensors: dict[str, gguf.Stored], *, types: bool
) -> tuple[str, str] | None:
    names = sorted(tensors)
    found = [
        (a, b)
        for n, a in enumerate(names)
        for b in names[n + 1 :]
        if tensors[a].shape == tensors[b].shape
        and (tensors[a].type == tensors[b].type or not types)
        and not np.array_equal(tensors[a].data, tensors[b].data)
    ]
    return rng.choice(found) if found else None


def gguf_swapped(rng: random.Random, path: Path) -> str | None:
    with gguf.edited(path) as (_, tensors):
        pair = _gguf_pair(rng, tensors, types=False)
        if pair is None:
            return None
        one, other = pair
        tensors[one], tensors[other] = tensors[other], tensors[one]
    return one


def gguf_copied(rng: random.Random, path: Path) -> str | None:
    with gguf.edited(path) as (_, tensors):
        pair = _gguf_pair(rng, tensors, types=False)
        if pair is None:
            return None
        tensors[pair[0]] = tensors[pair[1]]
    return pair[0]


def gguf_transposed(rng: random.Random, path: Path) -> str | None:
    with gguf.edited(path) as (_, tensors):
        names = [
            n for n, t in tensors.items()
            if len(t.shape) == 2 and t.shape[0] % max(1, t.type.weights) == 0
            and t.shape[0] != t.shape[1]
        ]  # fmt: skip
        if not names:
            return None
        name = rng.choice(names)
        t = tensors[name]
        data = t.data.reshape(t.shape[1], -1)
        tensors[name] = gguf.Stored(t.shape[::-1], t.type, data)
    return name


def gguf_key(rng: random.Random, path: Path) -> str | None:
    with gguf.edited(path) as (metadata, _):
        name = rng.choice(sorted(n for n, v in metadata.items() if v.kind is not Kind.ARRAY))
        value = metadata[name]
        new = another(rng, name, value.value)
        if rng.random() < 0.1:
            del metadata[name]
        elif new == value.value:
            return None
        else:
            metadata[name] = Value(value.kind, new)
    return name


def gguf_tokens(rng: random.Random, path: Path) -> str | None:
    with gguf.edited(path) as (metadata, _):
        key = "tokenizer.ggml.tokens"
        found = list(metadata[key].value)
        if rng.random() < 0.5:
            found = [*found[1:], found[0]]
        else:
            one, other = rng.sample(range(len(found)), 2)
            found[one], found[other] = found[other], found[one]
        metadata[key] = strings(found)
    return key


def gguf_page(rng: random.Random, path: Path) -> str | None:
    with gguf.edited(path) as (_, tensors):
        name = rng.choice([n for n, t in tensors.items() if t.data.nbytes >= 2 * PAGE])
        content = bytearray(tensors[name].data.tobytes())
        one, two = rng.sample(range(len(content) // PAGE), 2)
        a, b = (slice(n * PAGE, (n + 1) * PAGE) for n in (one, two))
        content[a], content[b] = content[b], content[a]
        flat: NDArray[np.uint8] = np.frombuffer(bytes(content), np.uint8)
        tensors[name].data = flat.reshape(tensors[name].data.shape)
    return name


CONFIGS: tuple[Draw, ...] = (
    quantization_changed, quantization_changed, config_changed, config_changed, tokens_exchanged,
)  # fmt: skip
GGUF: tuple[Draw, ...] = (
    gguf_left_out, gguf_renamed, gguf_doubled, gguf_swapped, gguf_copied, gguf_transposed,
    gguf_key, gguf_key, gguf_tokens, gguf_page,
)  # fmt: skip
