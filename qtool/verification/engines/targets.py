"""Which group of a compressed-tensors config a module falls under: targets are names, regular
expressions after `re:`, or the class Linear."""

from collections.abc import Mapping
from typing import Any

from qtool.formats.compressed_tensors_config import chosen_group, named
from qtool.formats.facts import names_of
from qtool.formats.patterns import any_of


def group_of(quantization: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
    """The group of a compressed-tensors config that a linear module falls under: by its name or
    an expression for it, else by its class; None also where that is not known."""
    groups = _groups(quantization)
    chosen = chosen_group([names_of(group.get("targets")) for group in groups], module)
    return None if chosen is None else groups[chosen]


def named_in_targets(quantization: Mapping[str, Any], module: str) -> bool | None:
    """Whether a target means a module by its name, not by its class; None where not known."""
    targets = [t for group in _groups(quantization) for t in names_of(group.get("targets"))]
    return any_of(named(target, module) for target in targets)


def _groups(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = quantization.get("config_groups")
    listed = groups.values() if isinstance(groups, Mapping) else ()
    return [group for group in listed if isinstance(group, Mapping)]


def weight_arguments(quantization: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """What compressed-tensors says of a module's weights; {} where nothing."""
    weights = (group_of(quantization, module) or {}).get("weights")
    return weights if isinstance(weights, Mapping) else {}
