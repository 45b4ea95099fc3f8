"""compressed-tensors' transform_config: rotations that an engine computes while the model runs.

    config_groups: {name: {type, apply: [{targets, location, inverse, ignore}], head_dim,
                           randomize, requires_grad, precision}}

    type hadamard       Sylvester's matrix S over sqrt(size), [S, S; S, -S] of half the size, of a
                        power of two; head_dim: its size, as many of it as fit; else all of it
    location input      of a linear layer: x H             q_attn, k_cache   of attention: q H, k H
             output, weight_input, weight_output           the two last are in the weights already

Written are groups R4 (inputs) and R3 (queries and keys). Of others' files the same is read: what is
not one of these is named in an error, since weights without their rotation are another network.

Source: the schema and factories of compressed-tensors 0.20 (transform/).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qtool.errors import FormatError, UnsupportedError
from qtool.formats.compressed_tensors_config import is_class, named
from qtool.formats.compressed_tensors_targets import targets_of
from qtool.formats.facts import names_of
from qtool.formats.patterns import any_of

KEY = "transform_config"
_ABSORBED = ("weight_input", "weight_output")
_HEADS = ("q_attn", "k_cache")


@dataclass(frozen=True)
class OnlineRotation:
    """One rotation: of the inputs of linear layers, or of queries and keys of attention."""

    name: str
    heads: bool
    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    size: int | None  # of H; None: all of the width

    def means(self, module: str) -> bool:
        """Whether a module is among its targets; UnsupportedError where that is not known."""
        return self._chosen(module, [_means(t, module, self.heads) for t in self.targets])

    def names(self, module: str) -> bool:
        """The same of a module that is no linear layer: by its name alone."""
        return self._chosen(module, [not is_class(t) and named(t, module) for t in self.targets])

    def _chosen(self, module: str, found: Sequence[bool | None]) -> bool:
        left = [_means(target, module, self.heads) for target in self.ignore]
        if any_of(found) is None or (any_of(found) and any_of(left) is None):
            raise UnsupportedError(
                f"{KEY}: whether {self.name} means {module} is not known: its expression is not "
                "matched here; write it without flags, lookbehinds and back references"
            )
        return bool(any_of(found)) and not any_of(left)


def _means(target: str, module: str, heads: bool) -> bool | None:
    if target.isidentifier() and target.endswith("Attention"):
        return heads
    if is_class(target):
        return not heads
    return named(target, module)


def written(
    inputs: Mapping[str, int], heads: Mapping[str, int], everything: Iterable[str]
) -> dict[str, Any] | None:
    """The table, None where nothing is rotated. inputs, heads: sizes by module.

    UnsupportedError where no targets mean these modules and no others in every engine.
    """
    names = [*everything]
    groups: dict[str, Any] = {}
    for label, sizes, locations, others in (
        ("R4", inputs, ("input",), names),
        ("R3", heads, _HEADS, sorted(heads)),
    ):
        for number, size in enumerate(sorted({*sizes.values()}, reverse=True)):
            chosen = sorted(module for module in sizes if sizes[module] == size)
            targets = targets_of(chosen, others)
            if targets is None:
                raise UnsupportedError(
                    f"{KEY}: no expressions mean {chosen[0]} and not the like of it elsewhere in "
                    "the model; quantize without rotate.r4"
                )
            groups[label if number == 0 else f"{label}_{size}"] = {
                "type": "hadamard",
                "apply": [
                    {"targets": targets, "location": where, "inverse": False, "ignore": []}
                    for where in locations
                ],
                "randomize": False,
                "requires_grad": False,
                "head_dim": size,
                "precision": "torch.float32",
            }
    return {"config_groups": groups} if groups else None


def online_rotations(config: Mapping[str, Any]) -> tuple[OnlineRotation, ...]:
    """What of a quantization_config an engine has to rotate; UnsupportedError for what is not done
    here, FormatError for what is no such table."""
    table = config.get(KEY)
    if table is None or table == {}:  # as llm-compressor writes none
        return ()
    groups = table.get("config_groups") if isinstance(table, Mapping) else None
    if not isinstance(groups, Mapping):
        raise FormatError(f"quantization_config: {KEY} has no config_groups; expected an object")
    found: list[OnlineRotation] = []
    for name, group in groups.items():
        where = f"quantization_config: {KEY}.config_groups.{name}"
        if not isinstance(group, Mapping) or not isinstance(group.get("apply"), list):
            raise FormatError(f"{where} has no list `apply`; expected an object with one")
        found += _rotations(where, str(name), group)
    return tuple(found)


def _rotations(where: str, name: str, group: Mapping[str, Any]) -> list[OnlineRotation]:
    online: dict[str, list[Mapping[str, Any]]] = {}
    for entry in group["apply"]:
        if not isinstance(entry, Mapping):
            raise FormatError(f"{where}.apply holds {entry!r:.40}; expected objects")
        location = str(entry.get("location"))
        if location not in _ABSORBED:
            online.setdefault(location, []).append(entry)
    if not online:
        return []
    size = group.get("head_dim")
    whole = size is None or (type(size) is int and size > 0 and size & (size - 1) == 0)
    if group.get("type") != "hadamard" or group.get("randomize") or not whole:
        raise UnsupportedError(
            f"{where}: a rotation of type {group.get('type')!r:.40}"
            + (f" of head_dim {size!r:.20}" if not whole else "")
            + (", randomized" if group.get("randomize") else "")
            + ", which is not done here; hadamard of a power of two is, and without its rotation "
            "the model is another one"
        )
    found = [_rotation(name, False, entry, size) for entry in online.pop("input", [])]
    queries, keys = (
        [_rotation(name, True, entry, size) for entry in online.pop(location, [])]
        for location in _HEADS
    )
    if online:
        raise UnsupportedError(
            f"{where}: a rotation of {', '.join(sorted(online))}, which is not done here; of "
            "input, and of q_attn with k_cache, it is"
        )
    if queries != keys or (keys and size is None):
        raise UnsupportedError(
            f"{where}: queries and keys are not rotated alike, of one head_dim; without that "
            "attention is another one"
        )
    return found + queries


def _rotation(name: str, heads: bool, entry: Mapping[str, Any], size: int | None) -> OnlineRotation:
    def listed(key: str) -> tuple[str, ...]:
        value = entry.get(key)
        return (value,) if isinstance(value, str) else names_of(value)

    return OnlineRotation(name, heads, listed("targets"), listed("ignore"), size)
