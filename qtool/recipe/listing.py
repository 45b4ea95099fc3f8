"""The shipped recipes as `qtool recipes` lists them: in groups, each with its first line."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from qtool.recipe import recipe
from qtool.recipe.gguf import GgufRecipe

SAFETENSORS = "safetensors, AWQ, GPTQ, MLX and others"
COMPRESSED = "safetensors, compressed-tensors and FP8"
_GGUF_GROUPS = (
    ("GGUF, K-quants", ("q6_k", "q5_k", "q4_k", "q3_k", "q2_k")),
    ("GGUF, i-quants", ("iq",)),
    ("GGUF, one scale for 32 weights", ("q8_0", "q5_", "q4_")),
    ("GGUF, for models trained or made for it", ("mxfp4_moe", "tq", "q2_0", "q1_0")),
    ("GGUF, unquantized", ("f", "bf16")),
)


@dataclass(frozen=True)
class Listed:
    """One shipped recipe."""

    name: str
    group: str
    about: str  # when to use it
    format: str
    calibrates: bool

    def json(self) -> dict[str, Any]:
        """An element of `qtool recipes --json`."""
        return {
            "name": self.name,
            "group": self.group,
            "format": self.format,
            "about": self.about,
            "calibrates": self.calibrates,
        }


def listed() -> list[Listed]:
    """All of them, group by group."""
    return _sorted(_listed(name) for name in recipe.shipped())


def in_order(names: Iterable[str]) -> list[str]:
    """Names of shipped recipes in the order of `listed`."""
    return [item.name for item in _sorted(_listed(name) for name in names)]


def _sorted(found: Iterable[Listed]) -> list[Listed]:
    groups = [SAFETENSORS, COMPRESSED, *(group for group, _ in _GGUF_GROUPS)]
    return sorted(found, key=lambda item: (groups.index(item.group), _rank(item)))


def by_group() -> Iterator[tuple[str, list[Listed]]]:
    """Each group with its recipes."""
    groups: dict[str, list[Listed]] = {}
    for item in listed():
        groups.setdefault(item.group, []).append(item)
    yield from groups.items()


def _listed(name: str) -> Listed:
    loaded = recipe.load(name)
    text = recipe.shipped()[name].read_text(encoding="utf-8")
    if isinstance(loaded, GgufRecipe):
        group = _gguf_group(loaded.type)
    else:
        group = COMPRESSED if loaded.format in ("compressed-tensors", "fp8") else SAFETENSORS
    about = text.splitlines()[0].lstrip("# ")
    return Listed(name, group, about, loaded.format, loaded.calibrates)


def _gguf_group(type_: str) -> str:
    return next(group for group, beginnings in _GGUF_GROUPS if type_.startswith(beginnings))


def _rank(item: Listed) -> tuple[bool, int, str]:
    """Large ones of GGUF first, as the names of their types count; others by name."""
    if item.format != "gguf":
        return False, 0, item.name
    type_ = item.name.partition("-")[0]
    digits = "".join(letter for letter in type_ if letter.isdecimal())
    sizes = ("_l", "_m", "_s", "_xs", "_xxs")
    size = next((k for k, end in enumerate(sizes) if type_.endswith(end)), 0)
    return True, -int(digits) * 10 + size, item.name
