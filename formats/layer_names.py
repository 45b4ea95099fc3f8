"""Names of layers that engines treat in a way of their own; one table for plan and formats.

Engines fuse some linear layers into one when they load, and look the result up under the fused
name; they take all experts of a block as one layer, `...experts`; and they know the output head
by its name. Beside the decoder a name tells, too, what is no linear layer.
"""

import re
from collections.abc import Iterable

# The fused name, and the parts that must be stored alike.
FUSED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("gate_up_proj", ("w1", "w3")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
)
_HEADS = ("lm_head", "embed_out", "output")
_EXPERT = re.compile(r"(.*\bexperts)\.(\d{1,6})\..+")
_DIGITS = 6
# Of positions, of how far two of them are apart, of special tokens, of codes. Lists have numbers.
_TABLES = re.compile(
    r"(.*[._])?(emb|embs|embeddings?|tokens?|codebooks?|table|bias|bias_values|pe_[kv]|shared)"
    r"(\.\d{1,6})?"
)


def is_head(module: str) -> bool:
    """Whether a module, named without `.weight`, is the output head; none is in a block."""
    *parents, last = module.split(".")
    # Parts of other models have some of these, too.
    alone = last in ("head", "output_projection") and len(parents) < 2
    return (alone or last in _HEADS) and not any(part.isdecimal() for part in parents)


def is_table(module: str) -> bool:
    """Whether rows of a matrix are looked up, and no linear layer multiplies with it, by the name
    of its module; of what is outside of the blocks."""
    return _TABLES.fullmatch(module) is not None


def number_of(part: str) -> int | None:
    """The number that a part of a name is; None for what is none, or larger than any model's."""
    return int(part) if part.isdecimal() and len(part) <= _DIGITS else None


def experts_of(name: str) -> tuple[str, int] | None:
    """The layer that an expert's tensor or module belongs to, and the expert's number."""
    found = _EXPERT.match(name)
    return (found[1], int(found[2])) if found else None


def fused_names(modules: Iterable[str]) -> set[str]:
    """The layers that engines make of some of these modules, where all parts of one are there."""
    names = set(modules)
    found = set()
    for name in names:
        parent, _, last = name.rpartition(".")
        for fused, parts in FUSED:
            if last == parts[0] and all(f"{parent}.{part}" in names for part in parts):
                found.add(f"{parent}.{fused}")
    return found
