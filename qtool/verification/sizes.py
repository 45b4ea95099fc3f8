"""Sizes that config.json says, of classes whose tensors no table tells, against what is stored.

Which tensors such a class has is not known, so that only what no class does is told: a width that
no tensor has, a vocabulary longer than any, heads that share out the rows of no projection.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from qtool.checkpoints.structure import text_config
from qtool.formats.layer_names import is_table
from qtool.verification.finding import Finding, of_setting
from qtool.verification.subject import Subject

CHECK = "tensors"
_HEADS = (("num_attention_heads", ".q_proj.weight"), ("num_key_value_heads", ".k_proj.weight"))


def check_sizes(subject: Subject) -> Iterator[Finding]:
    """Warnings, as what the class makes of its settings is not known."""
    if subject.untold or any(isinstance(one.scheme, str) for one in subject.entries.values()):
        return  # of matrices that are not read the shapes are not known
    shapes = {name: entry.shape for name, entry in subject.entries.items()}
    start = "" if subject.blocks is None else f"{subject.blocks.prefix}."
    for key, why in unlike_shapes(text_config(subject.config), shapes, start):
        yield Finding(
            "warning", CHECK, key,
            f"{why}: config and weights seem to be of different models, and engines refuse that; "
            "put back the model's own",
            of_setting(key),
        )  # fmt: skip


def unlike_shapes(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], start: str
) -> Iterator[tuple[str, str]]:
    """Settings that no tensor bears out, and what is said of each. shapes: by name. start: how the
    names of blocks begin."""
    lengths = {length for shape in shapes.values() for length in shape}
    width, tokens = (_count(config, key) for key in ("hidden_size", "vocab_size"))
    if width and lengths and width not in lengths:
        yield "hidden_size", f"config.json says hidden_size {width}, and no tensor is so wide"
    # A draft may take the embedding of the model that it writes for.
    matrices = (name.removesuffix(".weight") for name in shapes if name.endswith(".weight"))
    if tokens and any(map(is_table, matrices)) and tokens > max(lengths):
        yield "vocab_size", f"config.json says vocab_size {tokens}, and no tensor is so long"
    for key, end in _HEADS:
        heads = _count(config, key)
        own = (name for name in shapes if name.startswith(start) and name.endswith(end))
        rows = [shapes[name][0] for name in own if shapes[name][1:] == (width,)]
        if heads and rows and all(number % heads for number in rows):
            which = end.split(".")[1]
            yield key, f"config.json says {key} {heads}, by which the rows of no {which} divide"


def _count(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if type(value) is int and value > 0 else None
