"""Overrides that match nothing: they are refused, by a plan as by a run.

What was asked for would silently not be done, and a misspelled pattern is the usual reason.
"""

import difflib
import re
from collections.abc import Collection, Iterable
from fnmatch import translate
from typing import TYPE_CHECKING

from qtool.errors import RecipeError
from qtool.formats.layer_names import is_head
from qtool.gguf_mixtures.kinds import EMBEDDING_OF_TOKENS, HEAD

if TYPE_CHECKING:
    from qtool.recipe.gguf import GgufRecipe
    from qtool.recipe.recipe import Recipe

_SHOWN = 3  # names in the sentence
_SHELL = (
    "match is a shell pattern of the whole name in the checkpoint, such as *.down_proj or "
    "*.layers.[0-3].*"
)
_REGULAR = (
    "match is a regular expression found anywhere in the name in the GGUF file, such as ffn_down "
    r"or blk\.[0-3]\.; or, with a star in front, a shell pattern of the whole, such as "
    "*.ffn_down.weight"
)
# What is no part of any name, and means something in the other kind of recipe alone.
_SIGNS_OF_REGULAR = re.compile(r"^re:|[\\^$|(+]|^\.\*")
_SIGNS_OF_CHECKPOINTS = re.compile(r"layers|_proj|lm_head|embed_tokens")


def refuse(recipe: "Recipe", names: Collection[str]) -> None:
    """RecipeError where a pattern matches none of the names, nor of their modules."""
    headless = not any(is_head(name.removesuffix(".weight")) for name in names)
    modules = [name.removesuffix(".weight") for name in names]
    for number, entry in enumerate(recipe.overrides):
        hits = re.compile(translate(entry.match)).match
        if not any(hits(name) for name in (*modules, *names)):
            last = entry.match.removesuffix(".weight").rsplit(".", 1)[-1]
            if headless and is_head(last.strip("*")):
                raise RecipeError(
                    f"recipe {recipe.name}: overrides.{number}: match {entry.match!r} matches no "
                    "tensor of the model, whose output head is its embedding; remove the override"
                )
            raise _unmatched(recipe.name, number, entry.match, modules, _SHELL, _SIGNS_OF_REGULAR)


def refuse_gguf(recipe: "GgufRecipe", names: Collection[str]) -> None:
    """The same with the patterns of GGUF recipes."""
    for number, entry in enumerate(recipe.options.overrides):
        if not any(entry.hits(name) for name in names):
            if is_head(_plain(entry.match).removesuffix(".weight").rsplit(".", 1)[-1]):
                raise RecipeError(
                    f"recipe {recipe.name}: overrides.{number}: match {entry.match!r} matches no "
                    f"tensor of the model, whose output head is {_head_in_gguf(names)}"
                )
            raise _unmatched(
                recipe.name, number, entry.match, names, _REGULAR, _SIGNS_OF_CHECKPOINTS
            )


def _head_in_gguf(names: Collection[str]) -> str:
    """What it is, and how an override names it."""
    if HEAD in names:
        return rf"{HEAD} in GGUF; name it as ^output\., or give its type as --set output_type=q8_0"
    return (
        f"its embedding; name that, as {EMBEDDING_OF_TOKENS.removesuffix('.weight')}, give the "
        "type of both as --set output_type=q8_0, or remove the override"
    )


def _unmatched(
    recipe: str, number: int, pattern: str, names: Iterable[str], rule: str, signs: re.Pattern[str]
) -> RecipeError:
    """rule: what patterns are, said where one has signs of the other kind, or is like no name."""
    found = near(pattern, names)
    nearest = f"the nearest names are {', '.join(found)}" if found else "no name is like it"
    told = "" if found and not signs.search(pattern) else f"{rule}; "
    return RecipeError(
        f"recipe {recipe}: overrides.{number}: match {pattern!r} matches no tensor of the model; "
        f"{nearest}; {told}correct it, or remove the override: `qtool plan --all` then shows every "
        "name"
    )


def near(pattern: str, names: Iterable[str]) -> list[str]:
    """Names whose ends are most like the pattern, the first one of each kind."""
    plain = _plain(pattern)
    count = plain.count(".") + 1
    ends: dict[str, str] = {}
    for name in names:
        for whole in (name, name.removesuffix(".weight")):
            end = ".".join(whole.split(".")[-count:])
            ends.setdefault(end.lower(), name)
    found = [ends[end] for end in difflib.get_close_matches(plain, ends, _SHOWN, 0.5)]
    return list(dict.fromkeys(found))


def _plain(pattern: str) -> str:
    return pattern.replace("\\", "").strip("*.^$").lower()
