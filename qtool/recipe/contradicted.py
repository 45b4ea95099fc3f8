"""What is said where `--set` does not go with a recipe that is sound without it.

The file is not to blame then, nor the line of it that an error names: the item is, and recipes that
ship with what it asks for are named beside it.
"""

import re
from collections.abc import Callable, Iterator, Sequence

from qtool.errors import RecipeError
from qtool.recipe import yaml_source
from qtool.recipe.file import ALIASES, SET, document, read, shipped
from qtool.recipe.foreign import foreign_keys
from qtool.recipe.listing import in_order
from qtool.recipe.yaml_source import Document, Value

Use = Callable[[Document], object]
_SHOWN = 3  # recipes in a sentence


def blamed(
    said: str, text: str, origin: str, name: str, sets: Sequence[str], use: Use
) -> RecipeError:
    """The error `said` of a recipe with `sets`, as one of the items that it comes from.

    text, origin: the recipe's file. use: raises RecipeError where a document is no sound recipe.
    """

    def sound(some: Sequence[str]) -> bool:
        try:
            use(document(text, origin, some))
        except RecipeError:
            return False
        return True

    placed = next((item for item in sets if said.startswith(f"{SET} {item}: ")), None)
    if placed is None and not sound(()):
        return RecipeError(f"{said} (the recipe with {_options(sets)})")
    if placed is not None:
        guilty = [placed]
    else:  # those without which it would do; all of them where it takes several
        guilty = [item for item in sets if sound([other for other in sets if other != item])]
        guilty = guilty or [*sets]
    source = document(text, origin)
    sentence = _sentence(said, source, name, guilty, placed is not None)
    return RecipeError(sentence + _instead(source, guilty))


def _sentence(said: str, source: Document, name: str, guilty: Sequence[str], placed: bool) -> str:
    does = "do" if len(guilty) > 1 else "does"
    does_not = f"{_options(guilty)}: {does} not go with recipe {name}"
    is_gguf = source.at(("format",)) == "gguf"
    given = dict(item.split("=", 1) for item in guilty)
    keys = [
        key for item in given if (key := item.strip().partition(".")[0]) in foreign_keys(is_gguf)
    ]
    others = "formats other than gguf" if is_gguf else "GGUF files"
    if keys:
        why = f"{keys[0]} is a key of recipes for {others}"
        if keys[0] == "weights":
            why += "; here it is type, such as q4_k_m, that says how weights are stored"
        return f"{does_not}: {why}"
    if not placed and "format" in given and (given["format"].strip() == "gguf") != is_gguf:
        return f"{does_not}: recipes for {others} have other keys"
    return said if placed else f"{does_not}: {_without_place(said)}"


def _options(sets: Sequence[str]) -> str:
    more = " ..." if len(sets) > _SHOWN else ""
    return ", ".join(f"{SET} {item}" for item in sets[:_SHOWN]) + more


def _without_place(said: str) -> str:
    """Without FILE:LINE, which a recipe's error begins with."""
    return re.sub(r"\A.*?:\d+: ", "", said, count=1)


def _instead(source: Document, guilty: Sequence[str]) -> str:
    """Shipped recipes that say themselves what the items ask for, the most similar ones first."""
    wanted = dict(_item(item) for item in guilty)
    base = dict(_leaves(source.value))
    bits = _bits(base)
    ranks: dict[str, tuple[bool, int]] = {}
    for name, path in shipped().items():
        leaves = dict(_leaves(yaml_source.parse(read(path), str(path)).value))
        if leaves["format"] == "mxfp4" != base.get("format"):
            continue  # one model's own
        if all(key in leaves and _alike(leaves[key], value) for key, value in wanted.items()):
            common = sum(leaves.get(key) == value for key, value in base.items())
            ranks[name] = (_bits(leaves) != bits, -common)
    names = sorted(in_order(ranks), key=lambda name: ranks[name])[:_SHOWN]
    return f"; recipes with it: {', '.join(names)}" if names else ""


def _item(item: str) -> tuple[str, Value]:
    key, _, text = item.partition("=")
    return key.strip(), yaml_source.parse(text, SET, lines=False).value


def _leaves(value: Value, path: str = "") -> Iterator[tuple[str, Value]]:
    """The innermost values of a recipe, by key.key; a list is one value."""
    if not isinstance(value, dict):
        yield path, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{path}.{key}" if path else key)


def _alike(one: Value, other: Value) -> bool:
    """Whether they are the same value; names of types in any case of letters."""
    if isinstance(one, str) and isinstance(other, str):
        return one.lower() == ALIASES.get(other.lower(), other.lower())
    return type(one) is type(other) and one == other


def _bits(leaves: dict[str, Value]) -> str:
    """How many bits most weights have, as a digit."""
    digits = re.search(r"\d", str(leaves.get("type", leaves.get("weights.bits", ""))))
    return digits.group() if digits else ""
