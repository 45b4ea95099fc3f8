"""The output head, and in MLX's format the embedding: dense, unless an override of the recipe
names it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from qtool.checkpoints.roles import outside_reason
from qtool.checkpoints.structure import text_config
from qtool.errors import UnsupportedError
from qtool.formats.layer_names import is_head
from qtool.formats.mlx_models import plain_head
from qtool.recipe.recipe import Recipe
from qtool.recipe.weights import mlx_affine
from qtool.scheme import Dense, Dropped, Scheme

HEAD = Dense("output head")
EMBEDDING = Dense("embedding")
SAID_UNTIED = (
    "config.json says tie_word_embeddings, and the output head that is stored differs from the "
    "embedding: transformers takes the head, other engines the embedding; the artifact has the "
    "head, and says tie_word_embeddings false, so that all do the same"
)
# Last parts of names of embeddings that have a row for each token.
_OF_TOKENS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings")

_FORMATS = ("awq", "gptq", "compressed-tensors", "mlx")


def named(pattern: str) -> bool:
    """Whether a pattern means the head by its name; one of wildcards, which means layers of any
    name, does not."""
    return is_head(pattern.removesuffix(".weight").rsplit(".", 1)[-1].lstrip("*"))


def means(recipe: Recipe, pattern: str, name: str, action: object) -> bool:
    """Whether a pattern means a tensor outside of blocks, by its name, which some engine has
    quantized: a head, or, in mlx-lm, an embedding."""
    if action == HEAD:
        return named(pattern)
    last = name.removesuffix(".weight").rsplit(".", 1)[-1]
    asked = pattern.removesuffix(".weight").rsplit(".", 1)[-1].lstrip("*")
    return action == EMBEDDING and recipe.format == "mlx" and asked == last


def says_tied(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that the head is the embedding."""
    key = "tie_word_embeddings"
    return config.get(key, text_config(config).get(key)) is True


def has_own(actions: Mapping[str, object]) -> bool:
    """Whether one tensor is an output head, and an artifact has it."""
    kept = [name for name, one in actions.items() if not isinstance(one, Dropped)]
    return sum(outside_reason(name) == HEAD.reason for name in kept) == 1


def of_tokens(name: str) -> bool:
    """Whether a tensor outside of the blocks is, by its name, the token embedding."""
    return name.removesuffix(".weight").rsplit(".", 1)[-1] in _OF_TOKENS


def quantize_outside(
    recipe: Recipe, actions: dict[str, Scheme | Dense | Dropped], kind: str, tied: bool
) -> None:
    """Give the token embedding and the head the bits that a recipe of MLX's format has for them.
    kind: model_type; tied: the head is the embedding."""
    if recipe.format != "mlx" or recipe.rounding == "none":
        return
    head = None if plain_head(kind, tied) else recipe.mlx.head
    bits = {HEAD: None if tied else head, EMBEDDING: head if tied else recipe.mlx.embedding}
    for name, action in actions.items():
        width = bits.get(action) if isinstance(action, Dense) else None
        if width and (action == HEAD or of_tokens(name)):
            actions[name] = replace(_integers(recipe.scheme), bits=width)


def _integers(scheme: Scheme) -> Scheme:
    """The recipe's, or, where layers are small floats, of the groups that mlx-lm takes itself."""
    return mlx_affine(Scheme(4, 64, False)) if scheme.is_float else scheme


def scheme(recipe: Recipe, number: int, name: str) -> Scheme:
    """What an override of this number begins with; UnsupportedError where no engine has the head
    so."""
    found = recipe.scheme
    kind = None
    if recipe.format not in _FORMATS:
        kind = f"of format {recipe.format}"
    elif recipe.activations is not None:
        kind = "with rounded inputs"
    elif found.is_float or found.rows != 1:
        kind = "of small floats, or of one scale for many rows"
    if kind is not None:
        raise UnsupportedError(
            f"overrides.{number}: {name} is the output head, which recipes {kind} leave dense; "
            "remove the override, or choose a recipe of integers for the weights alone, in "
            f"format {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}"
        )
    return found


def refuse_tied(recipe: Recipe, names: Iterable[str], tied: bool) -> None:
    """UnsupportedError where an override would quantize a head that is the embedding. tied: by
    config.json."""
    asked = (n for n, one in enumerate(recipe.overrides) if one.weights and named(one.match))
    number = next(asked, None)
    if number is None:
        return
    own = any(outside_reason(name) == HEAD.reason for name in names)
    if tied or not own:
        if recipe.format == "mlx":
            raise UnsupportedError(
                f"overrides.{number}: the model's output head is its embedding, which mlx-lm reads "
                "as both: remove the override, and give its bits as --set mlx.head=8"
            )
        why = "config.json says tie_word_embeddings" if own else "no tensor is a head of its own"
        raise UnsupportedError(
            f"overrides.{number}: the model's output head is its embedding ({why}), which engines "
            "read as it is; remove the override, or take a GGUF recipe, which quantizes the two as "
            "one"
        )
