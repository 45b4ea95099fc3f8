"""What the quantization_config says against what is stored."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from qtool.artifacts.entry import Entry
from qtool.artifacts.stored_config import quantization_config
from qtool.checkpoints.layer_names import experts_of, is_head
from qtool.checkpoints.structure import FUSED_EXPERTS, fused_layer, text_config
from qtool.errors import QtoolError
from qtool.formats import auto_round
from qtool.formats.bitsandbytes import skips
from qtool.formats.compressed_tensors_config import is_class, named
from qtool.formats.facts import first
from qtool.formats.gptq_dynamic import entry_for, negative, overridden
from qtool.formats.patterns import any_of, matches
from qtool.formats.safetensors_header import read_json
from qtool.scheme import Scheme
from qtool.verification.finding import Finding
from qtool.verification.sentences import count as counted
from qtool.verification.sentences import some
from qtool.verification.skip_lists import malformed
from qtool.verification.subject import Subject

_MUCH_DENSE = 0.2  # of the linear layers' weights
_LISTS = (
    "modules_to_not_convert", "dynamic", "ignore", "ignored_layers", "exclude_modules",
    "llm_int8_skip_modules", "extra_config", "block_name_to_quantize", "to_quant_block_names",
)  # fmt: skip
# In these the config says whether the head is quantized; of others no engine asks for its codes.
_WITH_HEADS = ("awq", "gptq", "compressed-tensors")


def says_dense(subject: Subject, module: str) -> bool | None:
    """Whether the config leaves a linear layer, named as in the checkpoint, unquantized; None
    where that depends on an expression that is not matched here."""
    found = subject.artifact.found
    config = quantization_config(subject.artifact.checkpoint)
    if found.quant_method == auto_round.NAME:
        return auto_round.left_dense(config, module)
    if found.format == "mlx":  # what has no scales is dense there
        entry = subject.entries.get(module)
        stacked = entry is not None and entry.stacked
        return not stacked and f"{module}.scales" not in subject.artifact.checkpoint.tensors
    if found.format == "gptq":
        if is_head(module):
            return config.get("lm_head") is not True
        inside = config.get("modules_in_block_to_quantize")
        if isinstance(inside, list) and inside:
            flat = [n for part in inside for n in (part if isinstance(part, list) else [part])]
            if not any(str(name) in module for name in flat):
                return True
        table = config.get("dynamic")
        key, known = entry_for(table if isinstance(table, Mapping) else {}, module)
        return (key is not None and negative(key)) if known else None
    if found.format == "compressed-tensors":
        groups = config.get("config_groups")
        targets = [
            str(target)
            for group in (groups.values() if isinstance(groups, dict) else ())
            if isinstance(group, dict) and isinstance(group.get("targets"), list)
            for target in group["targets"]
        ]
        ignored = any_of(named(pattern, module) for pattern in found.dense)
        targeted = any_of(is_class(target) or named(target, module) for target in targets)
        return any_of([ignored, None if targeted is None else not targeted])
    if found.format == "modelopt":
        return any(fnmatch(module, pattern) for pattern in found.dense)
    if found.format == "mxfp4":  # engines have it of experts alone
        left = any_of(matches(rf"(?:{name})(?:[.]|$)", module) for name in found.dense)
        return ".experts." not in module or left
    if is_head(module) and found.format == "awq" and config.get("lm_head") is not True:
        return True
    if found.format == "awq":
        return any(name in module for name in found.dense)
    if found.format == "bitsandbytes":
        return any_of(skips(entry, module) for entry in found.dense)
    inside = f".{module}."
    return any(inside.startswith(f".{n}.") or inside.endswith(f".{n}.") for n in found.dense)


def _key_for(subject: Subject, module: str) -> str:
    """The key that leaves a linear layer unquantized, as says_dense has it."""
    found = subject.artifact.found
    config = quantization_config(subject.artifact.checkpoint)
    if found.format == "compressed-tensors":
        ignored = any_of(named(pattern, module) for pattern in found.dense)
        return "ignore" if ignored else "targets of config_groups"
    if found.quant_method != auto_round.NAME and found.format in ("awq", "gptq"):
        if is_head(module) and config.get("lm_head") is not True:
            return "lm_head"
        table = config.get("dynamic")
        if found.format == "gptq":
            key, _ = entry_for(table if isinstance(table, Mapping) else {}, module)
            negated = key is not None and negative(key)
            return "dynamic" if negated else "modules_in_block_to_quantize"
    return next((key for key in _LISTS if config.get(key)), "lm_head")


def check_said(subject: Subject) -> Iterator[Finding]:
    """quantized-config: a quantized artifact says so in config.json."""
    checkpoint = subject.artifact.checkpoint
    if checkpoint.path.is_dir() and not (checkpoint.folder / "config.json").is_file():
        yield Finding(
            "error", "quantized-config", "config.json",
            "the folder has no config.json, without which no engine loads it; put the one beside "
            "the weights that they were made with",
        )  # fmt: skip
        return
    if subject.artifact.found.format != "dense" and not quantization_config(checkpoint):
        yield Finding(
            "error", "quantized-config", "config.json",
            "the tensors are quantized, and no quantization_config says how (shapes look like "
            f"{subject.artifact.found.format}); engines load it as a dense model and fail: put "
            "back the config that it was made with",
        )  # fmt: skip
        return
    beside = [name for name in _SIDE if (checkpoint.folder / name).is_file()]
    if beside and subject.artifact.found.format != "dense" and not said_inside(subject.config):
        yield Finding(
            "warning", "quantized-config", "config.json",
            f"config.json has no quantization_config, {beside[0]} alone says how the tensors are "
            "quantized; vLLM looks there, transformers does not and takes it for a dense model: "
            "put it into config.json",
        )  # fmt: skip


def said_inside(config: Mapping[str, Any]) -> bool:
    """Whether config.json itself says how tensors are quantized."""
    parts = (config, text_config(config))
    return any(part.get(k) for part in parts for k in ("quantization_config", "compression_config"))


def check_dense_list(subject: Subject) -> Iterator[Finding]:
    """dense-list: what the config calls dense is, and nothing else."""
    if subject.artifact.found.format == "dense":
        return
    config = quantization_config(subject.artifact.checkpoint)
    if wrong := [*malformed(config)]:
        yield from wrong
        return
    silent = all(config.get(key) is None for key in _LISTS) and not config.get("config_groups")
    linears = [e for e in subject.linears if e.scheme is None]
    heads = [e for e in subject.entries.values() if is_head(e.module) and e.scheme is None]
    if subject.artifact.found.format not in _WITH_HEADS:
        heads = []
    said = {e.module: says_dense(subject, e.module) for e in subject.entries.values()}
    if unknown := [module for module, answer in said.items() if answer is None]:
        yield Finding(
            "note", "dense-list", unknown[0],
            f"whether the config leaves {counted(len(unknown), 'module')} ({some(unknown)}) "
            "unquantized depends on an expression that is not matched here; it was not checked",
        )  # fmt: skip
    dense = [e.module for e in (*linears, *heads) if said[e.module] is False]
    experts = [module for module in dense if experts_of(module)]
    stacks = [n for n, role in subject.roles.items() if role.reason == FUSED_EXPERTS]
    stacks = [n for n in stacks if subject.entries[n].scheme is None]
    experts += [n for n in stacks if says_dense(subject, fused_layer(n)) is False]
    if experts:
        yield Finding(
            "error", "dense-list", experts[0],
            f"{counted(len(experts), 'matrix')} of experts are stored unquantized, and the config "
            f"does not say so: {some(experts)}; quantize them, or name them as left out",
        )  # fmt: skip
    others = [module for module in dense if not experts_of(module)]
    if others:
        tail = (
            "the config names no layer as left out: engines that do not look into the headers "
            "will ask for codes"
            if silent
            else "by the config they are quantized, so engines will ask for codes"
        )
        yield Finding(
            "warning" if silent else "error", "dense-list", others[0],
            f"{counted(len(others), 'linear layer')} stored unquantized: {some(others)}; {tail}",
        )  # fmt: skip
    packed = [e.module for e in subject.entries.values() if e.scheme is not None and said[e.module]]
    if packed:
        yield Finding(
            "error", "dense-list", packed[0],
            f"{counted(len(packed), 'matrix')} stored quantized, and by the config "
            f"({_key_for(subject, packed[0])}) left unquantized: {some(packed)}; engines will ask "
            "for a weight that is not there",
        )  # fmt: skip


def check_scheme(subject: Subject) -> Iterator[Finding]:
    """scheme: bits and group size of the config are those of the shapes."""
    found = subject.artifact.found
    if found.scheme is None or found.format not in ("awq", "gptq"):
        return
    wrong: dict[str, list[str]] = defaultdict(list)
    for entry in subject.entries.values():
        if not isinstance(entry.scheme, Scheme):
            continue
        said = overridden(entry.module, found)
        if not entry_for([key for key, _ in found.overrides], entry.module)[1]:
            continue
        columns = entry.shape[-1]
        if said.bits != entry.scheme.bits or said.groups(columns) != entry.scheme.groups(columns):
            text = (
                f"the config says {said.bits} bits in groups of {said.group_size}, and the shapes "
                f"{entry.scheme.bits} bits in groups of {entry.scheme.group_size}"
            )
            wrong[text].append(entry.module)
    for text, modules in wrong.items():
        yield Finding(
            "error", "scheme", modules[0],
            f"{text}: {counted(len(modules), 'matrix')} ({some(modules)}); engines believe the "
            "config: correct it",
        )  # fmt: skip


def check_share(subject: Subject) -> Iterator[Finding]:
    """unquantized: most of what could be quantized is."""
    if subject.artifact.found.format in ("dense", "mxfp4"):  # of which the latter has experts alone
        return
    kinds: Counter[str] = Counter()
    total = dense = 0
    names: dict[str, str] = {}
    for name, role in subject.roles.items():
        entry = subject.entries[name]
        if role.reason is not None and role.reason != FUSED_EXPERTS:
            continue
        total += entry.parameters
        if entry.scheme is None:
            dense += entry.parameters
            kind = _kind(entry)
            kinds[kind] += entry.parameters
            names.setdefault(kind, name)
    config = quantization_config(subject.artifact.checkpoint)
    if dense == total and config.get("kv_cache_scheme") and not config.get("config_groups"):
        return  # the cache alone
    if total and not any(entry.scheme for entry in subject.entries.values()):
        yield Finding(
            "error", "unquantized", "",
            f"the config says {subject.artifact.found.quant_method}, and nothing is quantized",
        )  # fmt: skip
    elif total and dense > _MUCH_DENSE * total:
        kind = kinds.most_common(1)[0][0]
        yield Finding(
            "warning", "unquantized", names[kind],
            f"{dense / total:.0%} of the weights in the blocks' linear layers, which alone are "
            f"counted here, are unquantized, most of them {kind} ({names[kind]}); the artifact is "
            f"larger than its {_claim(subject)} promise",
        )  # fmt: skip


def _claim(subject: Subject) -> str:
    scheme = subject.artifact.found.scheme
    return f"{scheme.bits} bits" if scheme is not None else subject.artifact.found.format


def _kind(entry: Entry) -> str:
    if "experts" in entry.name:
        return "experts"
    return entry.module.rpartition(".")[2]


# Files that tell the same as config.json, and the keys that must agree, under all their names.
SIDE = "side-config"
_SIDE = ("quantize_config.json", "quant_config.json")
_AGREE = (
    ("bits", "w_bit", "wbits"),
    ("group_size", "q_group_size"),
    ("sym",),
    ("zero_point",),
    ("desc_act",),
    ("checkpoint_format", "version"),
)


def check_side_files(subject: Subject) -> Iterator[Finding]:
    """side-config: the files beside config.json say what it says."""
    folder = subject.artifact.checkpoint.folder
    if not isinstance(subject.config.get("quantization_config"), Mapping):
        return
    main = subject.config["quantization_config"]
    for file in _SIDE:
        if (folder / file).is_file():
            yield from _compare(folder / file, main)


def _compare(path: Path, main: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        beside = read_json(path)
    except QtoolError as error:
        yield Finding("warning", SIDE, path.name, str(error))
        return
    for keys in _AGREE:
        one, other = first(main, *keys), first(beside, *keys)
        if one is not None and other is not None and _plain(one) != _plain(other):
            key, there = (next(k for k in keys if t.get(k) is not None) for t in (main, beside))
            yield Finding(
                "error", SIDE, path.name,
                f"config.json says {key} {one!r}, and {path.name} {there} {other!r}; engines read "
                "one or the other: make them agree",
            )  # fmt: skip


def _plain(value: object) -> object:
    return re.sub("[-_]", "", value.lower()) if isinstance(value, str) else value


def conversions(subject: Subject) -> list[Mapping[str, Any]]:
    """What `qtool convert` records of itself, the latest last."""
    listed = (subject.artifact.provenance or {}).get("conversions")
    found = listed if isinstance(listed, list) else []
    return [one for one in found if isinstance(one, Mapping)]


def side(conversion: Mapping[str, Any], which: str) -> str | None:
    """The format that a conversion was `from` or `to`."""
    told = conversion.get(which)
    named = told.get("format") if isinstance(told, Mapping) else None
    return named if isinstance(named, str) else None


def dequantized(subject: Subject) -> list[Mapping[str, Any]]:
    """Conversions to an unquantized checkpoint, the latest last."""
    return [one for one in conversions(subject) if side(one, "to") == "hf"]


def _divides(size: int, whole: object) -> bool:
    return size > 0 and isinstance(whole, int) and whole % size == 0


def check_provenance(subject: Subject) -> Iterator[Finding]:
    """provenance: qtool.json speaks of this artifact."""
    if subject.artifact.unreadable:
        yield Finding(
            "error", "provenance", "qtool.json",
            f"cannot be read ({subject.artifact.unreadable}), so that nothing says how the "
            "artifact was made; fetch or make it again",
        )  # fmt: skip
    record = subject.artifact.provenance or {}
    recipe = record.get("recipe", {})
    if not isinstance(recipe, Mapping):
        return
    found = subject.artifact.found
    changed = conversions(subject)
    said = side(changed[-1], "to") if changed else recipe.get("format")
    said = {"hf": "dense"}.get(said, said) if isinstance(said, str) else None
    if isinstance(said, str) and said != found.format:
        yield Finding(
            "error", "provenance", "qtool.json",
            f"qtool.json says format {said}, config.json {found.format}; one of them is of "
            "another artifact",
        )  # fmt: skip
    weights = recipe.get("weights")
    if not isinstance(weights, Mapping) or found.scheme is None or changed:
        return
    size = found.scheme.group_size
    if recipe.get("indivisible") == "smaller-group" and _divides(size, weights.get("group_size")):
        size = weights["group_size"]
    for key, value in (
        ("bits", found.scheme.bits),
        ("group_size", size),
        ("symmetric", found.scheme.symmetric),
    ):
        if key in weights and weights[key] != value and not recipe.get("overrides"):
            yield Finding(
                "error", "provenance", "qtool.json",
                f"qtool.json says weights.{key} {weights[key]}, config.json {value}; one of them "
                "is of another artifact",
            )  # fmt: skip
