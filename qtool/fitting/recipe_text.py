"""A recipe that gives each tensor its type, as YAML that people can read and change."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from qtool.fitting.outside import table
from qtool.formats.layer_names import experts_of
from qtool.gguf_mixtures.kinds import EMBEDDING_OF_TOKENS, HEAD
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import Recipe

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_KEYS = {EMBEDDING_OF_TOKENS: "embedding_type", HEAD: "output_type"}


def gguf_text(
    base: GgufRecipe, tables: Mapping[str, str], about: str, types: Mapping[str, str]
) -> str:
    """`base` with types of tensors, by GGUF name; about: the first line, without its mark.

    Layers whose tensors of a kind have one type share a line. What the recipe says itself of other
    tensors comes first, as it counts. tables: types of further embeddings, which keep them where
    the embedding gets another.
    """
    if EMBEDDING_OF_TOKENS in types:
        types = {**tables, **types}
    keys: dict[str, Any] = {}
    layers: dict[tuple[str, str], list[int]] = {}
    others: list[tuple[str, str]] = []
    for name, kind in types.items():
        if name in _KEYS:
            keys[_KEYS[name]] = kind.lower()
        elif found := _LAYER.fullmatch(name):
            layers.setdefault((found[2], kind), []).append(int(found[1]))
        else:
            others.append((name, kind))
    made = [(_pattern(name, numbers), kind) for (name, kind), numbers in sorted(layers.items())]
    made += [(f"^{re.escape(name)}$", kind) for name, kind in others]
    overrides = [f"{{match: {_quoted(pattern)}, type: {kind.lower()}}}" for pattern, kind in made]
    return _text(base, about, keys, overrides)


def checkpoint_text(
    base: Recipe,
    modules: Mapping[str, Sequence[str]],
    keys: Mapping[str, str],
    about: str,
    bits: Mapping[str, str],
) -> str:
    """`base` with bits of modules, by what engines fuse; about: the first line, without its mark.
    keys: of MLX's table, for units that have theirs there.

    What is as the recipe says of all is not said again; its overrides say other
    things than bits, or are of other modules.
    """
    assert base.weights is not None
    usual = str(base.weights.bits)
    made = [
        json.dumps({"match": name, "weights": {"bits": int(width)}})
        for unit, width in bits.items()
        if width != usual and unit not in keys
        for name in _named(modules[unit])
    ]
    return _text(base, about, table(base, keys, bits), made)


def _named(modules: Sequence[str]) -> list[str]:
    """Patterns of a unit's modules: one for all experts of a block."""
    experts = [experts_of(module) for module in modules]
    layers = dict.fromkeys(found[0] for found in experts if found)
    return [f"{layer}.*" for layer in layers] or list(modules)


def _text(
    base: Recipe | GgufRecipe, about: str, more: dict[str, Any], overrides: Sequence[str]
) -> str:
    """`base` with more keys, and overrides after its own."""
    keys = base.model_dump(mode="json", exclude_unset=True)
    every = [*map(json.dumps, keys.pop("overrides", [])), *overrides]
    lines = [f"# {about}", *(f"{key}: {json.dumps(value)}" for key, value in (keys | more).items())]
    if every:
        lines += ["overrides:", *(f"- {item}" for item in every)]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """As YAML has it without escapes."""
    return "'" + text.replace("'", "''") + "'"


def _pattern(name: str, layers: list[int]) -> str:
    numbers = "|".join(map(str, sorted(layers)))
    chosen = numbers if len(layers) == 1 else f"({numbers})"
    return rf"^blk\.{chosen}\.{re.escape(name)}$"
