"""A recipe that gives each tensor its type, as YAML that people can read and change."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from qtool.fitting.gguf_losses import EMBEDDING, HEAD
from qtool.gguf.recipe import GgufRecipe
from qtool.recipe.recipe import Recipe

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_KEYS = {EMBEDDING: "embedding_type", HEAD: "output_type"}


def gguf_text(base: GgufRecipe, about: str, types: Mapping[str, str]) -> str:
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
    lines = _head(about, keys, overrides)
    lines += [f"- {{match: '{pattern}', type: {kind.lower()}}}" for pattern, kind in made]
    return "\n".join(lines) + "\n"


def checkpoint_text(
    base: Recipe, modules: Mapping[str, Sequence[str]], about: str, bits: Mapping[str, str]
) -> str:
    """`base` with bits of modules, by what engines fuse; about: the first line, without its mark.

    The recipe's own bits are said once for all; its overrides come first and are of other modules.
    """
    keys = base.model_dump(mode="json", exclude_unset=True)
    overrides = keys.pop("overrides", [])
    usual = max(set(bits.values()), key=list(bits.values()).count, default="")
    if usual:
        keys["weights"] = {**keys["weights"], "bits": int(usual)}
    lines = _head(about, keys, overrides)
    for unit, width in bits.items():
        if width != usual:
            patch = {"weights": {"bits": int(width)}}
            lines += [f"- {json.dumps({'match': name, **patch})}" for name in modules[unit]]
    return "\n".join(lines) + "\n"


def _head(about: str, keys: Mapping[str, Any], overrides: Sequence[Any]) -> list[str]:
    lines = [f"# {about}", *(f"{key}: {json.dumps(value)}" for key, value in keys.items())]
    return [*lines, "overrides:", *(f"- {json.dumps(override)}" for override in overrides)]


def _pattern(name: str, layers: list[int]) -> str:
    numbers = "|".join(map(str, sorted(layers)))
    chosen = numbers if len(layers) == 1 else f"({numbers})"
    return rf"^blk\.{chosen}\.{re.escape(name)}$"
