"""Much of a decoder that a plan does not see as matrices: refused, unless the recipe asks for it.

Experts fused in a way that is not taken apart, other parameters that are no linear layer's weight,
blocks in a second list: nobody chose that these stay dense, and the artifact would be hardly
smaller than the model. `dense: true` for them in the recipe's overrides chooses it.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase, translate

from qtool.checkpoints import structure
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.roles import FUSED_EXPERTS, LEAST_EXPERT_WIDTH, NO_LINEAR, OUTSIDE
from qtool.errors import UnsupportedError
from qtool.formats import mxfp4
from qtool.planned import Planned
from qtool.planning.fit import means
from qtool.recipe.recipe import Recipe
from qtool.scheme import Dropped

MUCH = 0.25  # of the numbers in decoder blocks
_LITTLE = 0.05  # of them, which the sentence leaves out
_SECOND = "blocks in a list of their own, which this version does not quantize"


def refuse(recipe: Recipe, checkpoint: Checkpoint, tensors: Sequence[Planned]) -> None:
    """UnsupportedError where more than a quarter of the decoder blocks' weights stay dense, and
    neither the recipe nor what these are says that they should."""
    if recipe.rounding == "none":
        return
    inside = [t for t in tensors if t.block is not None and not isinstance(t.action, Dropped)]
    second = _second_list(inside, tensors)
    found = {t: str(t.reason) for t in inside if _unseen(t)} | dict.fromkeys(second, _SECOND)
    chosen = _overridden(recipe, (tensor.name for tensor in found))
    left = {tensor: reason for tensor, reason in found.items() if tensor.name not in chosen}
    total = sum(tensor.parameters for tensor in (*inside, *second))
    share = sum(tensor.parameters for tensor in left) / total if total else 0.0
    if share > MUCH:
        kinds = _largest(left, _LITTLE * total)
        what = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in kinds.items())
        quantized = [tensor.module for tensor in tensors if tensor.scheme is not None]
        patterns = _patterns([name for names in kinds.values() for name in names], quantized)
        entries = [f'{{match: "{pattern}", dense: true}}' for pattern in patterns]
        raise UnsupportedError(
            f"{checkpoint.path}: recipe {recipe.name} would leave {share:.0%} of the decoder "
            f"blocks' weights dense without saying so ({what}); where that is meant, say it: "
            f"{overriding(entries, bool(recipe.overrides))}{_or_others(recipe, checkpoint)}"
        )


def overriding(entries: Iterable[str], others: bool) -> str:
    """How to give a recipe overrides, which may have others already."""
    listed = ", ".join(entries)
    return f"add {listed} to its overrides" if others else f"--set 'overrides=[{listed}]'"


def _largest(left: Mapping[Planned, str], rest: float) -> dict[str, list[str]]:
    """Reason to kinds of names, the largest first, until no more than `rest` numbers are left."""
    sizes: Counter[tuple[str, str]] = Counter()
    for tensor, reason in left.items():
        sizes[reason, re.sub(r"\.\d+(?=\.)", ".*", tensor.name)] += tensor.parameters
    found: dict[str, list[str]] = defaultdict(list)
    remaining = sizes.total()
    for (reason, kind), size in sizes.most_common():
        if remaining > rest:
            found[reason].append(kind)
        remaining -= size
    return found


def _unseen(tensor: Planned) -> bool:
    """Whether it holds matrices, by its shape, and no scheme was thought of for it."""
    reason = str(tensor.reason)
    if len(tensor.shape) == 3 and reason.endswith("not a matrix"):
        return min(tensor.shape[1:]) >= LEAST_EXPERT_WIDTH
    return reason in (FUSED_EXPERTS, NO_LINEAR)


def _second_list(inside: Sequence[Planned], tensors: Iterable[Planned]) -> list[Planned]:
    """Matrices of numbered blocks outside of the decoder's that have all names and shapes of its
    own: a model that runs two lists of blocks. Not of towers, nor of multi-token prediction."""
    alike = {(_split(t.name)[1], t.shape) for t in inside if t.scheme is not None}
    lists: dict[str, list[Planned]] = defaultdict(list)
    for tensor in tensors:
        if tensor.reason == OUTSIDE and len(tensor.shape) > 1:
            lists[_split(tensor.name)[0]].append(tensor)
    return [
        tensor
        for prefix, found in lists.items()
        if all((_split(one.name)[1], one.shape) in alike for one in found)
        and not structure.OTHER_TOWERS.search(prefix)
        and not structure.AHEAD.search(prefix)
        for tensor in found
    ]


def _split(name: str) -> tuple[str, str]:
    """What comes before the first number in a name, and what follows it."""
    found = re.fullmatch(r"(.+?)\.\d+\.(.+)", name)
    return ("", name) if found is None else (found[1], found[2])


def _overridden(recipe: Recipe, names: Iterable[str]) -> set[str]:
    """Names that the recipe says to leave dense."""
    patterns = [re.compile(translate(one.match)) for one in recipe.overrides if one.dense]
    return {name for name in names if any(means(pattern, name) for pattern in patterns)}


def _patterns(names: Iterable[str], quantized: Collection[str]) -> list[str]:
    """Patterns that match all of `names` and no quantized module; of their modules, if possible."""
    found: dict[str, None] = {}
    for name in names:
        wide = f"{name.removesuffix('.weight').rpartition('.')[0]}.*"
        hits = any(fnmatchcase(module, wide) for module in quantized)
        found[name if hits else wide] = None
    return [*found]


def _or_others(recipe: Recipe, checkpoint: Checkpoint) -> str:
    """The recipes that take the model: gpt-oss's own, and of GGUF where its class is one of
    theirs."""
    from qtool.gguf.architectures import TABLE, class_named

    known = class_named(checkpoint.config) in TABLE
    own = checkpoint.config.get("model_type") == mxfp4.MODEL and recipe.format != mxfp4.NAME
    recipes = ["mxfp4-gpt-oss, which stores them in its own format"] if own else []
    recipes += ["a GGUF recipe such as q4_k_m, which quantizes them"] if known else []
    return "".join(f", or take {recipe}" for recipe in recipes)
