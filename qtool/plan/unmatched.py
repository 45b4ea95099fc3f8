"""Overrides that match nothing: they are refused, by a plan as by a run.

What was asked for would silently not be done, and a misspelled pattern is the usual reason.
"""

import difflib
import re
from collections.abc import Collection, Iterable
from fnmatch import translate
from typing import TYPE_CHECKING

from qtool.errors import RecipeError

if TYPE_CHECKING:
    from qtool.gguf.recipe import GgufRecipe
    from qtool.recipe.recipe import Recipe

_SHOWN = 3  # names in the sentence


def refuse(recipe: "Recipe", names: Collection[str]) -> None:
    """RecipeError where a pattern matches none of the names, nor of their modules."""
    modules = [name.removesuffix(".weight") for name in names]
    for number, entry in enumerate(recipe.overrides):
        hits = re.compile(translate(entry.match)).match
        if not any(hits(name) for name in (*modules, *names)):
            raise _unmatched(recipe.name, number, entry.match, modules)


def refuse_gguf(recipe: "GgufRecipe", names: Collection[str]) -> None:
    """The same with the patterns of GGUF recipes."""
    for number, entry in enumerate(recipe.options.overrides):
        if not any(entry.hits(name) for name in names):
            raise _unmatched(recipe.name, number, entry.match, names)


def _unmatched(recipe: str, number: int, pattern: str, names: Iterable[str]) -> RecipeError:
    found = near(pattern, names)
    nearest = f"the nearest names are {', '.join(found)}" if found else "no name is like it"
    return RecipeError(
        f"recipe {recipe}: overrides.{number}: match {pattern!r} matches no tensor of the model; "
        f"{nearest}; correct it, or remove the override: `qtool plan --all` then shows every name"
    )


def near(pattern: str, names: Iterable[str]) -> list[str]:
    """Names whose ends are most like the pattern, the first one of each kind."""
    plain = pattern.replace("\\", "").strip("*.^$").lower()
    count = plain.count(".") + 1
    ends: dict[str, str] = {}
    for name in names:
        for whole in (name, name.removesuffix(".weight")):
            end = ".".join(whole.split(".")[-count:])
            ends.setdefault(end.lower(), name)
    found = [ends[end] for end in difflib.get_close_matches(plain, ends, _SHOWN, 0.5)]
    return list(dict.fromkeys(found))
