"""Which group of a compressed-tensors config a module falls under: targets are names, regular
expressions after `re:`, or the class Linear."""

from collections.abc import Mapping
from typing import Any

from qtool.formats.patterns import matches


def group_of(
    quantization: Mapping[str, Any], module: str, by_class: bool = True
) -> Mapping[str, Any] | None:
    """The group of a compressed-tensors config that a linear module falls under: by its name or
    an expression for it, else by its class."""
    groups = quantization.get("config_groups")
    listed = groups.values() if isinstance(groups, Mapping) else ()
    found = [group for group in listed if isinstance(group, Mapping)]
    for named in (True, False) if by_class else (True,):
        for group in found:
            targets = group.get("targets")
            for target in targets if isinstance(targets, list) else []:
                if names_it(str(target), module) if named else target == "Linear":
                    return group
    return None


def weight_arguments(quantization: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """What compressed-tensors says of a module's weights; {} where nothing."""
    weights = (group_of(quantization, module) or {}).get("weights")
    return weights if isinstance(weights, Mapping) else {}


def names_it(target: str, module: str) -> bool:
    """Whether a name or `re:` expression of compressed-tensors means a module."""
    if target.startswith("re:"):
        return matches(target.removeprefix("re:"), module)
    return target == module
