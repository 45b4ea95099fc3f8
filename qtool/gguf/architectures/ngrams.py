"""Embeddings of n-grams in Qwen4-Exp: a table whose rows are found by hashes of the last tokens.

For a token t[0] and those before it, up to n - 1 of them,

    mixed = t[0] * m[0] ^ t[1] * m[1] ^ ...        row = mixed % size[head] + offset[head]

The sizes are primes, one after another from a setting on, and the multipliers m are odd numbers
of a generator (splitmix64) that starts with a seed. Checkpoints keep all of them as integers, too.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from qtool.checkpoints.hf_config import Config, count, integers, number
from qtool.formats.gguf_values import Kind, Value, array, u32
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import BLOCK, Module, in_blocks

_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
DEFAULTS = {
    "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 8, "seed": 1234,
    "ngram_vocab_size_base": 20_000_000, "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 512,
}  # fmt: skip
_AT = BLOCK + "ple."


def _blocks(config: Config) -> list[int]:
    """Which blocks have them; settings count from one."""
    return [b - 1 for b in integers(config, "ple_layer_ids")]


def _has_ngrams(config: Config, b: int) -> bool:
    return b in _blocks(config)


def _table(module: Module, config: Config) -> Module:
    rows = sum(_sizes(config))
    each = count(config, "make_ngram_vocab_size_divisible_by")
    return replace(module, joined=-(-rows // each) * each)


def _norms(*names: str) -> Iterator[Module]:
    for name in names:
        shape = ("all residual streams",)
        yield Module(_AT + name, called=f"ple_{name}", shape=shape, add=1)


MODULES = in_blocks(_has_ngrams, (
    Module(_AT + "ple_embedding.ngram_embedding", called="per_layer_token_embd", of_model=True,
           within=_AT + "ple_embedding.ngram_embedding", fit=_table,
           each=(_AT + "ple_embedding.ngram_embedding.shard_{i}", "split_ngram_parts")),
    Module(_AT + "key_proj", called="ple_key", shape=("all residual streams", "width")),
    Module(_AT + "value_proj", called="ple_value", shape=("width", "width")),
    Module(_AT + "conv1d", called="ple_conv1d", shape=("all residual streams", "taps of n-grams"),
           squeezed=True),
    *_norms("norm_key", "norm_query", "norm_conv"),
))  # fmt: skip


def _is_prime(one: int) -> bool:
    return one == 2 or (
        one > 2 and one % 2 == 1 and all(one % k for k in range(3, math.isqrt(one) + 1, 2))
    )


def _sizes(config: Config) -> list[int]:
    """Of each head: the primes from the base on."""
    wanted = (count(config, "ngram_size") - 1) * count(config, "heads_per_ngram")
    found: list[int] = []
    one = count(config, "ngram_vocab_size_base")
    while len(found) < wanted:
        if _is_prime(one):
            found.append(one)
        one += 1
    return found


def _offsets(config: Config) -> list[int]:
    sizes = _sizes(config)
    return [sum(sizes[:head]) for head in range(len(sizes))]


def _multipliers(config: Config) -> list[int]:
    half = max(1, ((1 << 63) - 1) // count(config, "vocab_size") // 2)
    found = []
    for k in range(count(config, "ngram_size")):
        mixed = (int(number(config, "seed")) + _STEP * (k + 2)) & _WORD
        for shift, factor in _MIXING:
            mixed = ((mixed ^ (mixed >> shift)) * factor) & _WORD
        found.append(2 * ((mixed ^ (mixed >> 31)) % half) + 1)
    return found


def constants(config: Config) -> dict[str, list[int]]:
    """The integers that a checkpoint has beside the settings that they follow from, by tensor."""
    return {
        f"{_AT.replace('{b}', str(b))}ple_embedding.{name}": numbers
        for b in _blocks(config)
        for name, numbers in (
            ("layer_multipliers", _multipliers(config)),
            ("ngram_heads_vocab_sizes", _sizes(config)),
            ("ngram_heads_offsets", _offsets(config)),
        )
    }


def one_known_block(config: Config) -> str | None:
    if not (blocks := _blocks(config)):
        return None
    if len(blocks) > 1:
        return f"ple_layer_ids names {len(blocks)} blocks with n-grams, and it takes one"
    wide = config.get("ple_embed_dim") or config["hidden_size"]
    if wide == config["hidden_size"]:
        return None
    return f"ple_embed_dim is {wide}, and it takes the width of the model, {config['hidden_size']}"


def _if_any(key: str, make: Callable[[Config], Value | None], *, listed: bool = False) -> Key:
    return Key(key, "", lambda config: make(config) if _blocks(config) else None, listed=listed)


def _words(make: Callable[[Config], list[int]]) -> Callable[[Config], Value]:
    return lambda config: array(Kind.UINT64, make(config))


def _end(config: Config) -> Value:
    """Of a text, where n-grams begin anew."""
    given = config.get("eos_token_id")
    first = given[0] if isinstance(given, list) and given else given
    return u32(count({"eos_token_id": first}, "eos_token_id"))


def _image(config: Config) -> Value | None:
    return u32(config["image_token_id"]) if config.get("image_token_id") is not None else None


KEYS = (
    _if_any("ple.layers", lambda config: array(Kind.INT32, _blocks(config)), listed=True),
    _if_any("ple.ngram_size", lambda config: u32(count(config, "ngram_size"))),
    _if_any("ple.heads_per_ngram", lambda config: u32(count(config, "heads_per_ngram"))),
    _if_any("ple.conv_kernel", lambda config: u32(count(config, "ple_conv_kernel_size"))),
    _if_any("ple.eos_token_id", _end),
    _if_any("ple.image_token_id", _image),
    _if_any("embedding_length_per_layer_input",
            lambda config: u32(count(config, "hidden_size") // len(_sizes(config)))),
    _if_any("ple.layer_multipliers", _words(_multipliers), listed=True),
    _if_any("ple.head_offsets", _words(_offsets), listed=True),
    _if_any("ple.head_vocab_sizes", _words(_sizes), listed=True),
)  # fmt: skip
