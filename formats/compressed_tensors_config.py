"""compressed-tensors' quantization_config: groups of modules, and the arguments of each.

    config_groups: {name: {targets: [...], weights: {...}, input_activations: {...} or null,
                           output_activations, format}}
    ignore: [names, or "re:" and an expression]       format, kv_cache_scheme, quantization_status

    weights: num_bits, type int|float, symmetric, group_size, block_structure, dynamic,
             strategy tensor|channel|group|block|tensor_group

A target is a module's name, "re:" and an expression that matches from the start of the name, or
the name of a class, which here always means every linear layer.

Source: the schema of compressed-tensors 0.20 (quantization/quant_args, quant_scheme, quant_config).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qtool.errors import FormatError
from qtool.formats.compressed_tensors_targets import targets_of
from qtool.formats.facts import ArtifactScheme, Facts, Group, left_out, names_of, whole
from qtool.formats.layer_names import experts_of, fused_names, is_head
from qtool.formats.other_names import expressions
from qtool.formats.patterns import any_of, matches
from qtool.messages.printable import in_json
from qtool.scheme import Scheme

NAME = "compressed-tensors"
_DECODED = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
)  # fmt: skip
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_SCALE_TYPES = {"float8_e4m3": "torch.float8_e4m3fn", "e8m0": "torch.uint8"}
_WIDEST = 1 << 24  # features in a group


def detect(config: Mapping[str, Any]) -> ArtifactScheme | None:
    """The groups that a quantization_config tells, or None; without a scheme where the weights are
    stored in a way that is not decoded here (sparse, or of other widths)."""
    method = str(config.get("quant_method") or "").lower().replace("_", "-")
    table = config.get("config_groups")
    if method != NAME and not (not method and isinstance(table, Mapping)):
        return None
    written = str(config.get("format") or "")
    plain = ArtifactScheme(NAME, NAME, None, written, names_of(config.get("ignore")))
    sparse = config.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
        return plain
    if table is None or written not in _DECODED:
        return plain
    if not isinstance(table, Mapping):
        raise FormatError(
            "quantization_config: config_groups is no object; expected groups by name"
        )
    groups = []
    for name, group in table.items():
        where = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            raise FormatError(
                f"quantization_config: {where} is {in_json(group)}; expected an object"
            )
        weights = group.get("weights")
        if weights is None:
            continue  # activations only, such as attention's
        scheme = _scheme(where, weights, str(group.get("format") or written))
        if scheme is None:
            return plain
        inputs = group.get("input_activations")
        groups.append(
            Group(
                names_of(group.get("targets")), scheme, inputs if isinstance(inputs, dict) else None
            )
        )
    if not groups:
        return plain
    return ArtifactScheme(NAME, NAME, groups[0].scheme, written, plain.dense, groups=tuple(groups))


def _scheme(where: str, weights: object, layout: str) -> Scheme | None:
    """The scheme that a group's `weights` tell; None where it is one that is not decoded here."""
    if not isinstance(weights, Mapping):
        raise FormatError(
            f"quantization_config: {where}.weights is {in_json(weights)}; expected an object"
        )
    bits = whole(weights.get("num_bits", 8), f"{where}.weights.num_bits", 1, 64)
    kind = str(weights.get("type") or "int").lower()
    symmetric = weights.get("symmetric", True) is not False
    size = weights.get("group_size")
    strategy = str(weights.get("strategy") or "").lower()
    if not strategy:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy not in _STRATEGIES:
        raise FormatError(
            f"quantization_config: {where}.weights.strategy is {in_json(weights['strategy'])}; "
            f"expected one of {', '.join(_STRATEGIES)}"
        )
    rows, columns = 1, -1
    if strategy == "tensor":
        rows = -1
    elif strategy == "block":
        rows, columns = _block(where, weights.get("block_structure"))
    elif strategy in ("group", "tensor_group"):
        columns = whole(size, f"{where}.weights.group_size", 1, _WIDEST)
    if kind == "int" and 2 <= bits <= 8 and strategy != "tensor_group":
        return Scheme(bits, columns, symmetric, rows=rows)
    if kind != "float" or not symmetric:
        return None
    if bits == 8 and strategy != "tensor_group":
        mx = layout == "mxfp8-quantized" or str(weights.get("scale_dtype")) == "torch.uint8"
        return Scheme(8, columns, True, "e8m0" if mx else "float16", "e4m3", rows)
    if bits == 4 and strategy == "tensor_group":
        return Scheme(4, columns, True, "float8_e4m3", "e2m1", 1, "divides")
    if bits == 4 and strategy == "group":
        return Scheme(4, columns, True, "e8m0", "e2m1")
    return None


def _block(where: str, value: object) -> tuple[int, int]:
    """Rows and columns of a block: [128, 128], or "128x128" in older files."""
    if isinstance(value, str):
        value = [int(part) if part.isdecimal() else part for part in value.split("x")]
    if not isinstance(value, list) or len(value) != 2:
        raise FormatError(
            f"quantization_config: {where}.weights.block_structure is {in_json(value)}; expected "
            "rows and columns"
        )
    rows, columns = (whole(v, f"{where}.weights.block_structure", 1, _WIDEST) for v in value)
    return rows, columns


def group_of(module: str, found: ArtifactScheme) -> Group:
    """The group whose targets name a module: by its name, by an expression, by its class."""
    chosen = chosen_group([group.targets for group in found.groups], module)
    if chosen is not None:
        return found.groups[chosen]
    if len({group.scheme for group in found.groups}) == 1:
        return found.groups[0]  # names in configs drift from those in files
    raise FormatError(
        f"{module}: it is quantized, and which of the config's config_groups it is of is not "
        "known: no target names it, or one that might is an expression that is not matched here; "
        "name it, or write the expression without flags, lookbehinds and back references"
    )


def chosen_group(targets: Sequence[Sequence[str]], module: str) -> int | None:
    """Which of the groups' targets name a module: by its name, by an expression, by its class;
    None where none does, or where it depends on an expression that is not matched here."""
    for number, names in enumerate(targets):
        if module in names:
            return number
    for number, names in enumerate(targets):
        found = any_of(named(name, module) for name in names)
        if found is not False:
            return number if found else None
    return next((n for n, names in enumerate(targets) if any(map(is_class, names))), None)


def named(target: str, module: str) -> bool | None:
    """Whether a name, or `re:` and an expression, means a module; None where that is not known."""
    if target.startswith("re:"):
        return matches(target.removeprefix("re:"), module)
    return target == module


def is_class(target: str) -> bool:
    """Whether a target names a class, `Linear` nearly always, and so all linear layers."""
    others = target.endswith(("Attention", "Embedding"))
    return target.isidentifier() and target[:1].isupper() and not others


def layout_of(scheme: Scheme, integers: str) -> str:
    """The name of the way in which a scheme is stored; integers: packed or plain."""
    if scheme.book == "e2m1":
        return "mxfp4-pack-quantized" if scheme.scale_dtype == "e8m0" else "nvfp4-pack-quantized"
    if scheme.is_float:
        return "mxfp8-quantized" if scheme.scale_dtype == "e8m0" else "float-quantized"
    return "pack-quantized" if integers == "packed" else "int-quantized"


def written_config(facts: Facts, layouts: Mapping[str, str]) -> dict[str, Any]:
    """The config of an artifact. layouts: of each quantized module.

    The group of most modules is targeted by class, any other by expressions that match its modules
    and no others, or by their names, which engines know to rewrite; both mean the layers that
    engines fuse of them, too. The head, whose class is another in engines, has a group of its own.
    """
    modules: dict[tuple[Scheme, str, bool], list[str]] = {}
    for name, scheme in facts.quantized.items():
        modules.setdefault((scheme, layouts[name], is_head(name)), []).append(name)
    most = max(modules, key=lambda key: (not key[2], len(modules[key])), default=None)
    everything = [*facts.quantized, *facts.dense]
    groups: dict[str, Any] = {}
    for number, key in enumerate(sorted(modules, key=lambda key: key != most)):
        targets = ["Linear"]
        if key != most or key[2]:
            chosen = sorted(_with_fused(modules[key]))
            # What is in `ignore` may be meant by targets, too: it comes first.
            targets = (
                targets_of(chosen, _with_fused(everything))
                or targets_of(chosen, _with_fused([*facts.quantized]))
                or chosen
            )
        groups[f"group_{number}"] = {
            "targets": targets,
            "weights": _weights(key[0]),
            "input_activations": inputs_config(facts.activations),
            "output_activations": None,
            "format": key[1],
        }
    used = sorted({key[1] for key in modules})
    return {
        "quant_method": NAME,
        "format": used[0] if len(used) == 1 else "mixed-precision" if used else "dense",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*_with_fused(left_out(facts)), *expressions(facts)] if groups else [],
        "kv_cache_scheme": cache_config(facts.kv_cache),
        "global_compression_ratio": None,
    }


def _with_fused(names: Sequence[str]) -> list[str]:
    """Modules, and the layers that engines make of some: SGLang asks for these before it asks for
    their parts, which classes such as its Llama have no list of."""
    found = fused_names(name for name in names if experts_of(name) is None)
    found |= {f"{name}_with_mqa" for name in found if name.endswith("fused_qkv_a_proj")}
    return [*names, *sorted(found.difference(names))]


def _weights(scheme: Scheme) -> dict[str, Any]:
    """A scheme as QuantizationArgs; keys that do not apply are left out."""
    found: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "float" if scheme.is_float else "int",
        "symmetric": scheme.symmetric,
        "dynamic": False,
    }
    if scheme.rows > 1:
        return found | {"strategy": "block", "block_structure": [scheme.rows, scheme.group_size]}
    if scheme.group_size < 0:
        return found | {"strategy": "tensor" if scheme.rows < 0 else "channel"}
    found |= {
        "strategy": "tensor_group" if scheme.outer else "group",
        "group_size": scheme.group_size,
    }
    if scheme.scale_dtype in _SCALE_TYPES:
        found |= {"scale_dtype": _SCALE_TYPES[scheme.scale_dtype]}
    return found


def inputs_config(table: Mapping[str, object] | None) -> dict[str, Any] | None:
    """The recipe's `activations` as QuantizationArgs."""
    if table is None:
        return None
    found: dict[str, Any] = {
        "num_bits": table["bits"],
        "type": "int" if table["type"] == "int" else "float",
        "symmetric": True,
        "dynamic": table["dynamic"],
        "strategy": table["scale"] if table["dynamic"] else "tensor",
        "observer": None,
    }
    if table["type"] == "nvfp4":  # the scale of all is stored, those of groups are not
        local = {"dynamic": "local", "strategy": "tensor_group", "group_size": table["group_size"]}
        return found | local | {"scale_dtype": _SCALE_TYPES["float8_e4m3"]}
    if table["type"] == "mxfp4":
        found |= {"scale_dtype": _SCALE_TYPES["e8m0"]}
    if table["group_size"] != -1:
        found |= {"strategy": "group", "group_size": table["group_size"]}
    return found


def cache_config(table: Mapping[str, object] | None) -> dict[str, Any] | None:
    """The recipe's `kv_cache` as QuantizationArgs."""
    if table is None:
        return None
    return {
        "num_bits": table["bits"],
        "type": table["type"],
        "symmetric": True,
        "dynamic": False,
        "strategy": "attn_head" if table["scale"] == "head" else "tensor",
    }
