"""A recipe that gives each tensor its type, as YAML that people can read and change."""

import json
import re
from collections.abc import Mapping

from qtool.fitting.losses import EMBEDDING, HEAD
from qtool.gguf.recipe import GgufRecipe

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_KEYS = {EMBEDDING: "embedding_type", HEAD: "output_type"}


def recipe_text(about: str, base: GgufRecipe, types: Mapping[str, str]) -> str:
    """`base` with types of tensors, by GGUF name; about: the first line, without its mark.

    Layers whose tensors of a kind have one type share a line. What the recipe says itself of other
    tensors comes first, as it counts.
    """
    keys = base.model_dump(mode="json", exclude_unset=True)
    overrides = keys.pop("overrides", [])
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
    lines = [f"# {about}", *(f"{key}: {json.dumps(value)}" for key, value in keys.items())]
    lines.append("overrides:")
    lines += [f"- {json.dumps(override)}" for override in overrides]
    lines += [f"- {{match: '{pattern}', type: {kind.lower()}}}" for pattern, kind in made]
    return "\n".join(lines) + "\n"


def _pattern(name: str, layers: list[int]) -> str:
    numbers = "|".join(map(str, sorted(layers)))
    chosen = numbers if len(layers) == 1 else f"({numbers})"
    return rf"^blk\.{chosen}\.{re.escape(name)}$"
